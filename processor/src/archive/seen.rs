//! Which records the lake holds already: the newest number per (host, boot), and per incident task and partition.
//!
//! A publisher that restarts, or a file that is imported again, repeats records under other offsets; their numbers give
//! them away. After a restart the state is read back from the tables themselves, as it was at the offset where reading
//! goes on: rows of this log from there on do not count, because their records are about to be read again.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;

use arrow::array::{Array, AsArray, RecordBatch, StringArray};
use arrow::datatypes::{Int32Type, Int64Type};
use gpufleet_runtime::exit::Failure;
use gpufleet_runtime::lake::{Lake, active_files};
use gpufleet_schemas::record::Origin;
use gpufleet_schemas::table::Table;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use super::commit::Partition;

/// Newest record number per source.
#[derive(Debug, Default)]
pub struct Seen {
    records: HashMap<String, HashMap<String, i64>>,
    /// By incident task and partition of the incidents topic: within one partition a task's numbers ascend.
    outputs: HashMap<(String, i32), i64>,
}

impl Seen {
    /// Whether a record is a repeat; remembers it otherwise.
    pub fn repeats(&mut self, origin: &Origin) -> bool {
        if let Some(newest) = self.records.get_mut(&origin.host).and_then(|boots| boots.get_mut(&origin.boot_id)) {
            let repeats = origin.seq <= *newest;
            *newest = origin.seq.max(*newest);
            return repeats;
        }
        self.records.entry(origin.host.clone()).or_default().insert(origin.boot_id.clone(), origin.seq);
        false
    }

    /// Whether a task's output is a repeat; remembers it otherwise.
    pub fn repeats_output(&mut self, task: &str, partition: i32, emit_seq: i64) -> bool {
        let newest = self.outputs.entry((task.to_owned(), partition)).or_insert(-1);
        let repeats = emit_seq <= *newest;
        *newest = emit_seq.max(*newest);
        repeats
    }

    /// Reads the state back from the lake, as of the offsets `from`.
    pub async fn load(lake: &Lake, log_id: &str, from: &BTreeMap<Partition, i64>) -> Result<Seen, Failure> {
        let mut seen = Seen::default();
        for table in [Table::GpuSamples, Table::XidEvents, Table::Losses] {
            let columns = ["log_id", "topic", "partition", "offset", "host", "boot_id", "seq"];
            scan(lake, table, &columns, |rows| seen.add_records(rows, log_id, from)).await?;
        }
        let columns = ["log_id", "topic", "partition", "offset", "task", "emit_seq"];
        scan(lake, Table::Incidents, &columns, |rows| seen.add_outputs(rows, log_id, from)).await?;
        Ok(seen)
    }

    fn add_records(&mut self, rows: &Rows<'_>, log_id: &str, from: &BTreeMap<Partition, i64>) {
        let (hosts, boots, seqs) = (rows.text("host"), rows.text("boot_id"), rows.long("seq"));
        // Rows of one record stand together or nearly so: most are skipped by one comparison.
        let mut last: Option<(usize, i64)> = None;
        for i in 0..rows.batch.num_rows() {
            if hosts.is_null(i) || boots.is_null(i) || seqs.is_null(i) || rows.is_ahead(i, log_id, from) {
                continue;
            }
            let seq = seqs.value(i);
            if last.is_some_and(|(j, newest)| {
                seq <= newest && hosts.value(j) == hosts.value(i) && boots.value(j) == boots.value(i)
            }) {
                continue;
            }
            last = Some((i, seq));
            let origin_boots = self.records.entry(hosts.value(i).to_owned()).or_default();
            let newest = origin_boots.entry(boots.value(i).to_owned()).or_insert(seq);
            *newest = seq.max(*newest);
        }
    }

    fn add_outputs(&mut self, rows: &Rows<'_>, log_id: &str, from: &BTreeMap<Partition, i64>) {
        let (tasks, numbers) = (rows.text("task"), rows.long("emit_seq"));
        for i in 0..rows.batch.num_rows() {
            if !rows.is_ahead(i, log_id, from) {
                let key = (tasks.value(i).to_owned(), rows.partition(i));
                let newest = self.outputs.entry(key).or_insert(-1);
                *newest = numbers.value(i).max(*newest);
            }
        }
    }

    /// Newest number of a (host, boot), for an import that asks whether a file is in the lake.
    pub fn newest(&self, host: &str, boot_id: &str) -> Option<i64> {
        self.records.get(host).and_then(|boots| boots.get(boot_id)).copied()
    }
}

/// Columns of a batch by name; the tables' schemas are ours, so they are there with these types.
struct Rows<'a> {
    batch: &'a RecordBatch,
}

impl Rows<'_> {
    fn text(&self, name: &str) -> &StringArray {
        self.batch[name].as_string()
    }

    fn long(&self, name: &str) -> &arrow::array::Int64Array {
        self.batch[name].as_primitive::<Int64Type>()
    }

    fn partition(&self, i: usize) -> i32 {
        self.batch["partition"].as_primitive::<Int32Type>().value(i)
    }

    /// A row of this log whose record is going to be read again.
    fn is_ahead(&self, i: usize, log_id: &str, from: &BTreeMap<Partition, i64>) -> bool {
        if self.text("log_id").value(i) != log_id {
            return false;
        }
        let partition = (self.text("topic").value(i).to_owned(), self.partition(i));
        from.get(&partition).is_some_and(|next| self.long("offset").value(i) >= *next)
    }
}

async fn scan(lake: &Lake, table: Table, columns: &[&str], mut each: impl FnMut(&Rows<'_>)) -> Result<(), Failure> {
    let delta = lake.table(table).await?;
    let failed = |error: &dyn std::fmt::Display| {
        Failure::external(format!("cannot read the table {}: {error}", lake.path(table).display()))
    };
    for file in active_files(&delta)? {
        let file = File::open(lake.path(table).join(file.path.as_ref())).map_err(|error| failed(&error))?;
        let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(|error| failed(&error))?;
        let mask = ProjectionMask::columns(builder.parquet_schema(), columns.iter().copied());
        for batch in builder.with_projection(mask).build().map_err(|error| failed(&error))? {
            each(&Rows { batch: &batch.map_err(|error| failed(&error))? });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_a_repeat_when_its_host_and_boot_have_shown_its_number() {
        let mut seen = Seen::default();
        let origin = |boot: &str, seq| Origin { host: "node".into(), boot_id: boot.into(), seq, ..Origin::default() };
        assert!(!seen.repeats(&origin("a", 0)));
        assert!(!seen.repeats(&origin("a", 1)));
        assert!(seen.repeats(&origin("a", 1)));
        assert!(!seen.repeats(&origin("b", 0)), "another boot counts anew");
        assert!(!seen.repeats_output("task", 0, 0));
        assert!(!seen.repeats_output("task", 1, 0), "another partition has its own order");
        assert!(seen.repeats_output("task", 0, 0));
    }
}
