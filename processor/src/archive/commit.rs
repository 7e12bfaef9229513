//! One table's commits: rows and offsets together, or not at all.
//!
//! The application id of a partition is `<table>/<log_id>/<topic>/<partition>` and its version the next offset to read.
//! A second archive that commits for the same partition makes our next commit fail, which is the fence; after any
//! failure the table is read again and its offsets decide, because a failed call does not mean that nothing landed.

use std::collections::BTreeMap;

use arrow::array::RecordBatch;
use deltalake::DeltaTable;
use deltalake::checkpoints::create_checkpoint;
use deltalake::kernel::transaction::{CommitBuilder, CommitProperties};
use deltalake::kernel::{Action, Transaction};
use deltalake::protocol::{DeltaOperation, OutputMode};
use deltalake::writer::{DeltaWriter, RecordBatchWriter};
use gpufleet_runtime::exit::Failure;
use gpufleet_runtime::failpoint;
use gpufleet_runtime::lake::Lake;
use gpufleet_schemas::metric::Metric;
use gpufleet_schemas::table::Table;
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::file::metadata::SortingColumn;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::schema::types::ColumnPath;

/// Commits between two checkpoints of a table's log.
const CHECKPOINT_EVERY: u64 = 50;
const ROWS_PER_GROUP: usize = 131_072;

/// A partition of a topic.
pub type Partition = (String, i32);

/// Appends to one table.
pub struct TableCommits {
    table: Table,
    lake: Lake,
    delta: DeltaTable,
    log_id: String,
    /// Next offset of each partition, as committed.
    committed: BTreeMap<Partition, i64>,
    commits: u64,
    pub rows: u64,
    pub bytes: u64,
}

impl TableCommits {
    /// Opens the table and reads where each partition stands; 0 where it was never read.
    pub async fn open(
        lake: &Lake,
        table: Table,
        log_id: &str,
        partitions: &[Partition],
    ) -> Result<TableCommits, Failure> {
        let delta = lake.table(table).await?;
        let mut this = TableCommits {
            table,
            lake: lake.clone(),
            delta,
            log_id: log_id.to_owned(),
            committed: partitions.iter().map(|partition| (partition.clone(), 0)).collect(),
            commits: 0,
            rows: 0,
            bytes: 0,
        };
        this.committed = this.offsets().await?;
        Ok(this)
    }

    /// Next offset of a partition.
    pub fn next(&self, partition: &Partition) -> i64 {
        self.committed.get(partition).copied().unwrap_or(0)
    }

    /// Whether this table keeps offsets of the partition.
    pub fn owns(&self, partition: &Partition) -> bool {
        self.committed.contains_key(partition)
    }

    fn app_id(&self, partition: &Partition) -> String {
        app_id(self.table, &self.log_id, partition)
    }

    /// What the table's log says about our partitions.
    async fn offsets(&self) -> Result<BTreeMap<Partition, i64>, Failure> {
        let mut offsets = BTreeMap::new();
        for partition in self.committed.keys() {
            let next = next_offset(&self.delta, self.table, &self.log_id, partition).await;
            offsets.insert(partition.clone(), next.map_err(|error| self.failed("read", &error))?);
        }
        Ok(offsets)
    }

    fn failed(&self, what: &str, error: &dyn std::fmt::Display) -> Failure {
        Failure::external(format!("cannot {what} the table {}: {error}", self.lake.path(self.table).display()))
    }

    /// Commits rows and the offsets that they bring each partition to. Offsets alone are committed too.
    pub async fn commit(&mut self, rows: Option<RecordBatch>, next: &BTreeMap<Partition, i64>) -> Result<(), Failure> {
        let moved: BTreeMap<Partition, i64> = next
            .iter()
            .filter(|(partition, offset)| self.next(partition) < **offset)
            .map(|(p, o)| (p.clone(), *o))
            .collect();
        if moved.is_empty() {
            return Ok(());
        }
        let count = rows.as_ref().map_or(0, RecordBatch::num_rows);
        let adds = self.upload(rows).await?;
        self.bytes += adds.iter().map(|add| u64::try_from(add.size).unwrap_or(0)).sum::<u64>();
        let actions: Vec<Action> = adds.into_iter().map(Action::Add).collect();
        if let Err(error) = self.try_commit(actions.clone(), &moved).await {
            self.settle_doubt(actions, &moved, &error).await?;
        }
        failpoint::reached("archive.after_commit");
        self.committed.extend(moved);
        self.rows += count as u64;
        self.commits += 1;
        if self.commits.is_multiple_of(CHECKPOINT_EVERY) {
            create_checkpoint(&self.delta, None).await.map_err(|error| self.failed("checkpoint", &error))?;
        }
        Ok(())
    }

    async fn upload(&self, rows: Option<RecordBatch>) -> Result<Vec<deltalake::kernel::Add>, Failure> {
        let Some(rows) = rows.filter(|rows| rows.num_rows() > 0) else { return Ok(Vec::new()) };
        let mut writer = RecordBatchWriter::for_table(&self.delta)
            .map_err(|error| self.failed("write to", &error))?
            .with_writer_properties(writer_properties(self.table, &rows));
        writer.write(rows).await.map_err(|error| self.failed("write to", &error))?;
        failpoint::reached("archive.before_upload");
        let adds = writer.flush().await.map_err(|error| self.failed("write to", &error))?;
        failpoint::reached("archive.after_upload");
        Ok(adds)
    }

    async fn try_commit(
        &mut self,
        actions: Vec<Action>,
        moved: &BTreeMap<Partition, i64>,
    ) -> Result<(), deltalake::DeltaTableError> {
        let transactions =
            moved.iter().map(|(partition, offset)| Transaction::new(self.app_id(partition), *offset)).collect();
        let properties = CommitProperties::default()
            .with_application_transactions(transactions)
            // The post-commit hook could fail after the commit has landed; checkpoints are made apart.
            .with_create_checkpoint(false)
            .with_cleanup_expired_logs(Some(false));
        let operation = DeltaOperation::StreamingUpdate {
            output_mode: OutputMode::Append,
            query_id: format!("gpufleet/{}/{}", self.table.name(), self.log_id),
            epoch_id: i64::try_from(self.commits).unwrap_or(i64::MAX),
        };
        let commit = CommitBuilder::from(properties)
            .with_actions(actions)
            .build(Some(self.delta.snapshot()?), self.delta.log_store(), operation)
            .await?;
        self.delta.state = Some(commit.snapshot());
        Ok(())
    }

    /// After a failed commit: the table's own offsets say whether it landed, whether to try again, or that another
    /// archive has taken over.
    async fn settle_doubt(
        &mut self,
        actions: Vec<Action>,
        moved: &BTreeMap<Partition, i64>,
        error: &dyn std::fmt::Display,
    ) -> Result<(), Failure> {
        tracing::warn!(table = self.table.name(), %error, "a commit failed; reading the table to see whether it landed");
        self.delta = self.lake.table(self.table).await?;
        let found = self.offsets().await?;
        if moved.iter().all(|(partition, offset)| found.get(partition) == Some(offset)) {
            return Ok(());
        }
        if moved.keys().any(|partition| found.get(partition) != self.committed.get(partition)) {
            return Err(Failure::external(format!(
                "another archive has committed to the table {} for the same partitions; stop one of them",
                self.lake.path(self.table).display()
            )));
        }
        self.try_commit(actions, moved).await.map_err(|error| self.failed("commit to", &error))
    }
}

fn app_id(table: Table, log_id: &str, (topic, partition): &Partition) -> String {
    format!("{}/{log_id}/{topic}/{partition}", table.name())
}

/// Next offset of a partition, as a loaded table says; 0 where it was never read.
pub async fn next_offset(
    delta: &DeltaTable,
    table: Table,
    log_id: &str,
    partition: &Partition,
) -> Result<i64, deltalake::DeltaTableError> {
    let store = delta.log_store();
    let version = delta.snapshot()?.transaction_version(store.as_ref(), app_id(table, log_id, partition)).await?;
    Ok(version.unwrap_or(0))
}

/// Encodings that fit the columns (measured: `docs/adr/0002-parquet-layout.md`).
pub fn writer_properties(table: Table, rows: &RecordBatch) -> WriterProperties {
    let mut properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .set_max_row_group_row_count(Some(ROWS_PER_GROUP))
        .set_data_page_row_count_limit(20_000)
        .set_statistics_enabled(EnabledStatistics::Chunk)
        .set_created_by(concat!("gpufleet ", env!("CARGO_PKG_VERSION")).to_owned());
    let delta_packed = ["offset", "ingested_at", "observed_at", "seq", "kmsg_sequence", "emit_seq"];
    let noisy = [Metric::PowerDraw.name(), Metric::Energy.name(), Metric::MemoryUsed.name()];
    for name in delta_packed.iter().chain(&noisy) {
        let path = ColumnPath::from(*name);
        properties = properties
            .set_column_dictionary_enabled(path.clone(), false)
            .set_column_encoding(path, Encoding::DELTA_BINARY_PACKED);
    }
    if table == Table::GpuSamples {
        // The file has no `date` column, the partition's value: positions count without it.
        let position = |name: &str| rows.schema().index_of(name).ok().and_then(|index| i32::try_from(index - 1).ok());
        let sorted = ["gpu_uuid", "observed_at"].into_iter().filter_map(position);
        let sorted =
            sorted.map(|column_idx| SortingColumn { column_idx, descending: false, nulls_first: true }).collect();
        properties = properties.set_sorting_columns(Some(sorted));
    }
    properties.build()
}
