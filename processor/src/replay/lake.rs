//! The telemetry topic read back from the lake: records in offset order, as detection took them from Kafka.
//!
//! Takes a lake and a partition and gives records with their offsets and append times. Not there are: undecodable
//! records and repeats (both are in `losses`, and move nothing in detection), what a host said it had lost, a batch in
//! which no GPU was read, and a tick of a batch that no GPU read. It never writes.

mod batches;
mod columns;
mod records;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;

use arrow::array::{AsArray, BooleanArray, RecordBatch};
use arrow::datatypes::Int32Type;
use arrow::error::ArrowError;
use deltalake::DeltaTable;
use gpufleet_runtime::exit::Failure;
use gpufleet_runtime::lake::{Lake, active_files};
use gpufleet_schemas::metric::MetricSet;
use gpufleet_schemas::record::{Incident, Telemetry};
use gpufleet_schemas::table::{PARTITION_COLUMN, Table};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowPredicateFn, ParquetRecordBatchReaderBuilder, RowFilter};

use crate::archive::commit::next_offset;
use batches::Batches;
use columns::Columns;
use records::Topologies;

/// One record of the telemetry topic as the lake kept it.
#[derive(Clone, Debug, PartialEq)]
pub struct Kept {
    pub offset: i64,
    /// The broker's stamp, microseconds: when the record was appended to the log.
    pub appended_at: i64,
    pub record: Telemetry,
}

/// Every record of `partition` of (log_id, topic) that the lake holds whole and whose newest fact is from before
/// `until` (microseconds; all when none), in offset order. Batches have the `wanted` metrics only.
///
/// The tables are committed one after the other, so that one may be ahead: what not all of them have come to is left
/// out. A batch is never cut: its GPUs stand in the order of index and identity, its ticks are numbered anew from 0,
/// and it counts its time from the first of them.
///
/// All of the partition is in memory at once, about 30 bytes for each value that is wanted; go through a lake one
/// partition at a time.
pub async fn partition(
    lake: &Lake,
    log_id: &str,
    topic: &str,
    partition: i32,
    until: Option<i64>,
    wanted: MetricSet,
) -> Result<Vec<Kept>, Failure> {
    let place = (topic.to_owned(), partition);
    let mut tables = Vec::new();
    let mut whole = i64::MAX;
    for table in Table::TELEMETRY {
        let opened = Opened::open(lake, table).await?;
        let next = next_offset(&opened.delta, table, log_id, &place).await.map_err(|error| opened.failed(&error))?;
        whole = whole.min(next);
        tables.push(opened);
    }
    let only = Only { log_id: log_id.to_owned(), place: Some(place) };
    let (mut kept, mut batches, mut topologies) = (Vec::new(), Batches::of(wanted), Topologies::default());
    for opened in &tables {
        match opened.table {
            Table::GpuSamples => opened.scan(&batches.names(), Some(&only), |rows| batches.add(rows))?,
            Table::XidEvents => {
                opened.scan(&every(opened.table), Some(&only), |rows| records::events(rows, &mut kept))?
            }
            Table::Ticks => opened.scan(&every(opened.table), Some(&only), |rows| records::ticks(rows, &mut kept))?,
            Table::Topology => opened.scan(&every(opened.table), Some(&only), |rows| topologies.add(rows))?,
            Table::Incidents | Table::Losses => {}
        }
    }
    kept.extend(batches.finish());
    kept.extend(topologies.finish());
    kept.retain(|kept| kept.offset < whole && until.is_none_or(|until| kept.record.newest_at() < until));
    kept.sort_by_key(|kept| kept.offset);
    Ok(kept)
}

/// Which (log_id, topic, partitions) the lake holds telemetry of, in ascending order.
pub async fn logs(lake: &Lake) -> Result<Vec<(String, String, Vec<i32>)>, Failure> {
    let mut found: BTreeMap<(String, String), BTreeSet<i32>> = BTreeMap::new();
    for table in Table::TELEMETRY {
        Opened::open(lake, table).await?.scan(&ONLY, None, |rows| {
            let (logs, topics, partitions) = (rows.text("log_id")?, rows.text("topic")?, rows.int("partition")?);
            let place = |i: usize| (logs.value(i), topics.value(i), partitions.value(i));
            // Rows of one partition stand together or nearly so: most are skipped by one comparison.
            for i in (0..rows.len()).filter(|i| *i == 0 || place(*i) != place(i - 1)) {
                let (log, topic, partition) = place(i);
                found.entry((log.to_owned(), topic.to_owned())).or_default().insert(partition);
            }
            Ok(())
        })?;
    }
    Ok(found.into_iter().map(|((log, topic), partitions)| (log, topic, partitions.into_iter().collect())).collect())
}

/// Every revision of the incidents that were emitted for that log, by onset and id. Their `topic` and
/// `partition` say which records made the case. Evidence, actions and the statistic stay in the lake.
pub async fn incidents(lake: &Lake, log_id: &str) -> Result<Vec<Incident>, Failure> {
    let opened = Opened::open(lake, Table::Incidents).await?;
    let only = Only { log_id: log_id.to_owned(), place: None };
    let mut revisions = Vec::new();
    opened.scan(&records::INCIDENT_COLUMNS, Some(&only), |rows| {
        records::incidents(rows, log_id, |incident| revisions.push(incident))
    })?;
    revisions.sort_by(|a: &Incident, b| (a.onset_at, &a.id, a.revision).cmp(&(b.onset_at, &b.id, b.revision)));
    Ok(revisions)
}

/// The columns that a file of `table` has.
fn every(table: Table) -> Vec<&'static str> {
    table.columns().into_iter().map(|column| column.name).filter(|name| *name != PARTITION_COLUMN).collect()
}

/// The columns that [`Only`] looks at.
const ONLY: [&str; 3] = ["log_id", "topic", "partition"];

/// Rows of one log, and of one partition of a topic of it.
#[derive(Clone, Debug)]
struct Only {
    log_id: String,
    place: Option<(String, i32)>,
}

impl Only {
    fn keep(&self, rows: &RecordBatch) -> Result<BooleanArray, ArrowError> {
        let missing = || ArrowError::SchemaError("a file lacks log_id, topic or partition".to_owned());
        let text = |name: &str| rows.column_by_name(name)?.as_string_opt::<i32>();
        let (logs, topics) = (text("log_id").ok_or_else(missing)?, text("topic").ok_or_else(missing)?);
        let partitions = rows.column_by_name("partition").and_then(|column| column.as_primitive_opt::<Int32Type>());
        let partitions = partitions.ok_or_else(missing)?;
        let wanted = |i: usize| {
            let place = self.place.as_ref();
            place.is_none_or(|(topic, partition)| partitions.value(i) == *partition && topics.value(i) == topic)
                && logs.value(i) == self.log_id
        };
        Ok(BooleanArray::from((0..rows.num_rows()).map(wanted).collect::<Vec<bool>>()))
    }
}

/// A table at one version.
struct Opened {
    table: Table,
    delta: DeltaTable,
    lake: Lake,
}

impl Opened {
    async fn open(lake: &Lake, table: Table) -> Result<Opened, Failure> {
        Ok(Opened { table, delta: lake.table(table).await?, lake: lake.clone() })
    }

    fn failed(&self, error: &dyn std::fmt::Display) -> Failure {
        Failure::external(format!("cannot read the table {}: {error}", self.lake.path(self.table).display()))
    }

    /// Shows `each` the columns `names` of the rows that are wanted, file by file.
    fn scan(
        &self,
        names: &[&str],
        only: Option<&Only>,
        mut each: impl FnMut(&Columns<'_>) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        for file in active_files(&self.delta)? {
            let file =
                File::open(self.lake.path(self.table).join(file.path.as_ref())).map_err(|error| self.failed(&error))?;
            let mut builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(|error| self.failed(&error))?;
            if let Some(only) = only.cloned() {
                let mask = ProjectionMask::columns(builder.parquet_schema(), ONLY);
                let predicate = ArrowPredicateFn::new(mask, move |rows: RecordBatch| only.keep(&rows));
                builder = builder.with_row_filter(RowFilter::new(vec![Box::new(predicate)]));
            }
            let mask = ProjectionMask::columns(builder.parquet_schema(), names.iter().copied());
            for rows in builder.with_projection(mask).build().map_err(|error| self.failed(&error))? {
                let rows = rows.map_err(|error| self.failed(&error))?;
                each(&Columns::of(self.table, &rows))?;
            }
        }
        Ok(())
    }
}
