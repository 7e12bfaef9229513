//! What differs between the incidents of a replay and those that were emitted then.
//!
//! Both sides are looked at as of the range's end: an incident that was open there is open here, whatever came after. An
//! incident is the same when its id is, or when it is of the same kind and entity and both overlap.

use std::collections::BTreeMap;

use gpufleet_schemas::instant;
use gpufleet_schemas::record::{Incident, Severity, State};
use serde::Serialize;

/// The span that is compared, microseconds: what overlaps `[from, to)`.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    pub from: i64,
    pub to: i64,
}

/// An incident as it stood at the end of the range.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Stand {
    pub id: String,
    pub kind: String,
    /// Host, or feed.
    pub place: String,
    pub gpu_uuid: Option<String>,
    pub code: Option<i32>,
    pub severity: Severity,
    #[serde(serialize_with = "as_text")]
    pub onset_at: i64,
    #[serde(serialize_with = "as_optional_text")]
    pub end_at: Option<i64>,
    pub summary: String,
}

fn as_text<S: serde::Serializer>(at: &i64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&instant::text(*at))
}

fn as_optional_text<S: serde::Serializer>(at: &Option<i64>, serializer: S) -> Result<S::Ok, S::Error> {
    at.map(instant::text).serialize(serializer)
}

/// An incident that both sides have, otherwise.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Moved {
    pub then: Stand,
    pub now: Stand,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Difference {
    /// Incidents that were compared, then and in the replay.
    pub then: usize,
    pub now: usize,
    /// Only the replay has them.
    pub opened: Vec<Stand>,
    /// Only then had them.
    pub closed: Vec<Stand>,
    pub moved: Vec<Moved>,
    /// Emitted then, and begun before the log that was replayed.
    pub before_the_log: usize,
}

impl Difference {
    pub fn is_empty(&self) -> bool {
        self.opened.is_empty() && self.closed.is_empty() && self.moved.is_empty()
    }
}

/// The incidents of `revisions` as they stood at the range's end.
fn stands(revisions: &[Incident], range: Range) -> Vec<Stand> {
    let mut newest: BTreeMap<&str, &Incident> = BTreeMap::new();
    let mut later: BTreeMap<&str, &Incident> = BTreeMap::new();
    for incident in revisions {
        let known = if incident.decided_at <= range.to { &mut newest } else { &mut later };
        let first = known.entry(&incident.id).or_insert(incident);
        // Of what was decided later the first revision is nearest to what was known then.
        let nearer = if incident.decided_at <= range.to {
            incident.revision > first.revision
        } else {
            incident.revision < first.revision
        };
        if nearer {
            *first = incident;
        }
    }
    for (id, incident) in later {
        // A compacted topic has only what came after: it had begun by then, and had not ended.
        if incident.revision > 0 && incident.onset_at < range.to {
            newest.entry(id).or_insert(incident);
        }
    }
    let mut stands: Vec<Stand> = newest
        .into_values()
        .filter(|incident| !incident.summary.starts_with("withdrawn: "))
        .map(|incident| {
            let known = incident.decided_at <= range.to;
            let resolved = known && incident.state == State::Resolved;
            Stand {
                id: incident.id.clone(),
                kind: incident.kind.clone(),
                place: incident.feed.clone().unwrap_or_else(|| incident.host.clone()),
                gpu_uuid: incident.gpu_uuid.clone(),
                code: incident.code,
                severity: incident.severity,
                onset_at: incident.onset_at,
                end_at: incident.end_at.filter(|_| resolved),
                summary: incident.summary.clone(),
            }
        })
        .filter(|stand| stand.onset_at < range.to && stand.end_at.is_none_or(|end| end >= range.from))
        .collect();
    stands.sort_by(|a, b| (a.onset_at, &a.kind, &a.place, &a.id).cmp(&(b.onset_at, &b.kind, &b.place, &b.id)));
    stands
}

fn same_entity(a: &Stand, b: &Stand) -> bool {
    (&a.kind, &a.place, &a.gpu_uuid, a.code) == (&b.kind, &b.place, &b.gpu_uuid, b.code)
}

fn overlap(a: &Stand, b: &Stand) -> bool {
    a.end_at.is_none_or(|end| b.onset_at <= end) && b.end_at.is_none_or(|end| a.onset_at <= end)
}

/// Compares what was emitted `then` with what the replay says `now`. What begun before `log_start` cannot be replayed.
pub fn compare(then: &[Incident], now: &[Incident], range: Range, log_start: Option<i64>) -> Difference {
    let (mut then, mut rest) = (stands(then, range), stands(now, range));
    let mut difference = Difference::default();
    let emitted = then.len();
    then.retain(|stand| log_start.is_some_and(|start| stand.onset_at >= start));
    difference.before_the_log = emitted - then.len();
    (difference.then, difference.now) = (then.len(), rest.len());
    let mut unmatched = Vec::new();
    for then in then {
        match rest.iter().position(|now| now.id == then.id) {
            Some(at) => difference.meet(then, rest.remove(at)),
            None => unmatched.push(then),
        }
    }
    for then in unmatched {
        match rest.iter().position(|now| same_entity(&then, now) && overlap(&then, now)) {
            Some(at) => difference.meet(then, rest.remove(at)),
            None => difference.closed.push(then),
        }
    }
    difference.opened = rest;
    difference
}

impl Difference {
    fn meet(&mut self, then: Stand, now: Stand) {
        if (then.onset_at, then.end_at, then.severity) != (now.onset_at, now.end_at, now.severity) {
            self.moved.push(Moved { then, now });
        }
    }

    /// For a person.
    pub fn text(&self) -> String {
        let mut text = format!("{} incidents then, {} in the replay", self.then, self.now);
        if self.before_the_log > 0 {
            text += &format!("; {} that began before the log was left out", self.before_the_log);
        }
        if self.is_empty() {
            return text + "\nno difference\n";
        }
        text += &format!("\n{} opened, {} closed, {} moved\n", self.opened.len(), self.closed.len(), self.moved.len());
        let line = |mark: &str, stand: &Stand| {
            let end = stand.end_at.map_or("open".to_owned(), instant::text);
            let onset = instant::text(stand.onset_at);
            format!("{mark} {:<18} {:<9} {onset} to {end}  {}\n", stand.kind, stand.severity, stand.summary)
        };
        self.opened.iter().for_each(|stand| text += &line("+", stand));
        self.closed.iter().for_each(|stand| text += &line("-", stand));
        for Moved { then, now } in &self.moved {
            text += &line("<", then);
            text += &line(">", now);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn incident(id: &str, revision: i32, decided_at: i64, onset_at: i64, end_at: Option<i64>) -> Incident {
        Incident {
            id: id.into(),
            revision,
            decided_at,
            onset_at,
            end_at,
            state: if end_at.is_some() { State::Resolved } else { State::Open },
            severity: Severity::Warning,
            kind: "xid".into(),
            host: "node".into(),
            ..Incident::default()
        }
    }

    const RANGE: Range = Range { from: 100, to: 200 };

    #[test]
    fn both_sides_are_looked_at_as_of_the_end_of_the_range() {
        let then = [incident("a", 0, 110, 105, None), incident("a", 1, 300, 105, Some(290))];
        let now = [incident("a", 0, 110, 105, None)];
        assert!(compare(&then, &now, RANGE, Some(0)).is_empty());
        let compacted = [incident("a", 1, 300, 105, Some(290))];
        assert!(compare(&compacted, &now, RANGE, Some(0)).is_empty(), "the topic has forgotten the first revision");
        let outside = [incident("b", 0, 20, 10, Some(50)), incident("c", 0, 260, 250, None)];
        assert_eq!(compare(&outside, &[], RANGE, Some(0)).then, 0);
    }

    #[test]
    fn what_opens_closes_and_moves_is_told_apart() {
        let then = [incident("a", 0, 110, 105, None), incident("gone", 0, 120, 115, Some(118))];
        let now = [
            incident("other id", 0, 120, 112, None),
            Incident { kind: "ecc_rate".into(), ..incident("new", 0, 120, 119, None) },
        ];
        let difference = compare(&then, &now, RANGE, Some(0));
        assert_eq!((difference.opened.len(), difference.closed.len(), difference.moved.len()), (1, 1, 1));
        assert_eq!((difference.moved[0].then.onset_at, difference.moved[0].now.onset_at), (105, 112));
        assert!(difference.text().contains("1 opened, 1 closed, 1 moved"));
    }

    #[test]
    fn what_began_before_the_log_is_counted_and_not_compared() {
        let difference = compare(&[incident("a", 0, 110, 50, None)], &[], RANGE, Some(60));
        assert_eq!((difference.before_the_log, difference.is_empty()), (1, true));
    }
}
