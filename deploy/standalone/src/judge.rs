//! Planted against found. What was found is read by SQL from the lake, by code that cannot see the ledger.

use std::collections::BTreeMap;

use arrow::array::{Array, AsArray};
use arrow::datatypes::TimestampMicrosecondType;
use gpufleet_collector::simulator::Label;
use gpufleet_queries::{QueryError, Session};
use gpufleet_runtime::exit::Failure;
use gpufleet_schemas::instant;
use gpufleet_schemas::record::Explained;
use serde::{Serialize, Serializer};

/// An incident as the lake has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Found {
    #[serde(skip)]
    pub id: String,
    pub kind: String,
    pub host: String,
    pub gpu: Option<String>,
    #[serde(rename = "onset", serialize_with = "as_text")]
    pub onset_at: i64,
    #[serde(rename = "end", serialize_with = "as_optional_text")]
    pub end_at: Option<i64>,
}

fn as_text<S: Serializer>(at: &i64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&instant::text(*at))
}

fn as_optional_text<S: Serializer>(at: &Option<i64>, serializer: S) -> Result<S::Ok, S::Error> {
    at.map(instant::text).serialize(serializer)
}

/// Reads the incidents of one log from the lake, and what they explain.
pub async fn found(session: &Session, log_id: &str) -> Result<Vec<Found>, QueryError> {
    let sql = "SELECT id, kind, host, gpu_uuid, onset_at, end_at, explains FROM current_incidents WHERE log_id = $log \
               ORDER BY onset_at, kind, host, gpu_uuid";
    let answer = session.run(sql, &[("log".to_owned(), log_id.to_owned())]).await?;
    let mut found = Vec::new();
    for batch in &answer.batches {
        let text = |column: usize, row: usize| {
            let array = arrow::compute::cast(batch.column(column), &arrow::datatypes::DataType::Utf8).ok()?;
            let array = array.as_string::<i32>();
            (!array.is_null(row)).then(|| array.value(row).to_owned())
        };
        let instant = |column: usize, row: usize| {
            let array = batch.column(column).as_primitive::<TimestampMicrosecondType>();
            (!array.is_null(row)).then(|| array.value(row))
        };
        for row in 0..batch.num_rows() {
            let page = Found {
                id: text(0, row).unwrap_or_default(),
                kind: text(1, row).unwrap_or_default(),
                host: text(2, row).unwrap_or_default(),
                gpu: text(3, row),
                onset_at: instant(4, row).unwrap_or_default(),
                end_at: instant(5, row),
            };
            let explains = text(6, row).and_then(|json| serde_json::from_str::<Vec<Explained>>(&json).ok());
            for Explained { kind, onset_at, .. } in explains.into_iter().flatten() {
                found.push(Found { kind, onset_at, ..page.clone() });
            }
            found.push(page);
        }
    }
    Ok(found)
}

/// How many rows of one log a table holds.
pub async fn rows_of(session: &Session, table: &str, log_id: &str) -> Result<u64, Failure> {
    let sql = format!("SELECT count(*) FROM {table} WHERE log_id = $log");
    let answer = session.run(&sql, &[("log".to_owned(), log_id.to_owned())]).await?;
    let count = answer
        .batches
        .iter()
        .find(|batch| batch.num_rows() > 0)
        .map(|batch| batch.column(0).as_primitive::<arrow::datatypes::Int64Type>().value(0));
    u64::try_from(count.unwrap_or(0)).map_err(|_| Failure::bug("a count is negative"))
}

/// The comparison.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Per kind: planted, found, and found where it was planted.
    pub kinds: BTreeMap<String, (usize, usize, usize)>,
    pub missed: Vec<Label>,
    pub extra: Vec<Found>,
}

impl Verdict {
    pub fn equal(&self) -> bool {
        self.missed.is_empty() && self.extra.is_empty()
    }
}

/// Pairs each label with a found incident of the same kind and GPU whose onset and end lie within the label's grace.
pub fn compare(planted: &[Label], found: &[Found]) -> Verdict {
    let mut verdict = Verdict::default();
    let mut rest: Vec<&Found> = found.iter().collect();
    for label in planted {
        verdict.kinds.entry(label.kind.to_owned()).or_default().0 += 1;
        match rest.iter().position(|found| fits(label, found)) {
            Some(at) => {
                rest.remove(at);
                verdict.kinds.entry(label.kind.to_owned()).or_default().2 += 1;
            }
            None => verdict.missed.push(label.clone()),
        }
    }
    for incident in found {
        verdict.kinds.entry(incident.kind.clone()).or_default().1 += 1;
    }
    verdict.extra = rest.into_iter().cloned().collect();
    verdict
}

fn fits(label: &Label, found: &Found) -> bool {
    let near = |a: i64, b: i64| (a - b).abs() <= label.grace;
    found.kind == label.kind
        && found.host == label.host
        && found.gpu.as_deref() == Some(label.gpu.as_str())
        && near(found.onset_at, label.onset_at)
        && match (found.end_at, label.end_at) {
            (None, None) => true,
            (Some(found), Some(label)) => near(found, label),
            _ => false,
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label(end_at: Option<i64>) -> Label {
        Label { kind: "xid", host: "node".into(), gpu: "GPU-1".into(), onset_at: 100, end_at, grace: 5 }
    }

    fn incident(onset_at: i64, end_at: Option<i64>) -> Found {
        Found {
            id: String::new(),
            kind: "xid".into(),
            host: "node".into(),
            gpu: Some("GPU-1".into()),
            onset_at,
            end_at,
        }
    }

    #[test]
    fn only_an_incident_of_the_same_kind_and_gpu_and_time_is_the_planted_one() {
        assert!(compare(&[label(None)], &[incident(103, None)]).equal());
        assert!(!compare(&[label(None)], &[incident(106, None)]).equal(), "too late");
        assert!(!compare(&[label(None)], &[incident(100, Some(101))]).equal(), "ended");
        assert!(!compare(&[label(Some(200))], &[incident(100, Some(190))]).equal(), "ended elsewhere");
        let twice = compare(&[label(None)], &[incident(100, None), incident(101, None)]);
        assert_eq!((twice.missed.len(), twice.extra.len()), (0, 1), "a second incident is not planted");
        assert_eq!(compare(&[label(None)], &[]).missed.len(), 1);
    }
}
