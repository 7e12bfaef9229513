//! The tables of the lake: columns, types and what each means.
//!
//! The comments here become `docs/reference/tables.md`. Types keep to what every Delta reader knows (protocol 1,2):
//! signed integers, UTC microseconds, no nested types. Every table is partitioned by `date` only.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimeUnit};

use crate::metric::{Metric, Width};

/// A table of the lake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Table {
    GpuSamples,
    XidEvents,
    Ticks,
    Topology,
    Incidents,
    Losses,
}

/// One column: its definition, and what it means.
#[derive(Clone, Debug)]
pub struct Column {
    pub name: &'static str,
    pub data_type: DataType,
    pub nullable: bool,
    pub doc: &'static str,
}

/// The column that every table is partitioned by.
pub const PARTITION_COLUMN: &str = "date";

fn column(name: &'static str, data_type: DataType, doc: &'static str) -> Column {
    Column { name, data_type, nullable: false, doc }
}

fn nullable(name: &'static str, data_type: DataType, doc: &'static str) -> Column {
    Column { name, data_type, nullable: true, doc }
}

fn timestamp() -> DataType {
    DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()))
}

use DataType::{Boolean, Date32, Float64, Int32, Int64, Utf8};

impl Table {
    pub const ALL: [Table; 6] =
        [Table::GpuSamples, Table::XidEvents, Table::Ticks, Table::Topology, Table::Incidents, Table::Losses];

    /// The tables that together hold the records of the telemetry topic.
    pub const TELEMETRY: [Table; 4] = [Table::GpuSamples, Table::XidEvents, Table::Ticks, Table::Topology];

    pub const fn name(self) -> &'static str {
        match self {
            Table::GpuSamples => "gpu_samples",
            Table::XidEvents => "xid_events",
            Table::Ticks => "ticks",
            Table::Topology => "topology",
            Table::Incidents => "incidents",
            Table::Losses => "losses",
        }
    }

    /// What one row is.
    pub const fn doc(self) -> &'static str {
        match self {
            Table::GpuSamples => {
                "One row is one sample: one GPU at one tick. The key is (log_id, topic, partition, offset, gpu_uuid, tick)."
            }
            Table::XidEvents => {
                "One row is one event that a kernel log, or NVML, reported. The key is (log_id, topic, partition, offset)."
            }
            Table::Ticks => {
                "One row is one tick: time as a record, which moves its partition's watermark. The key is (log_id, topic, \
                 partition, offset)."
            }
            Table::Topology => {
                "One row is one host in one group of a topology record: the layout of the fleet from `observed_at` on. The \
                 key is (log_id, topic, partition, offset, position)."
            }
            Table::Incidents => {
                "One row is one revision of an incident; the highest revision of an id is its present. The key is (id, revision)."
            }
            Table::Losses => "One row is one thing that did not become a row elsewhere, with its reason and count.",
        }
    }

    pub fn columns(self) -> Vec<Column> {
        let mut columns = source_columns();
        columns.extend(match self {
            Table::GpuSamples => sample_columns(),
            Table::XidEvents => event_columns(),
            Table::Ticks => tick_columns(),
            Table::Topology => topology_columns(),
            Table::Incidents => incident_columns(),
            Table::Losses => loss_columns(),
        });
        columns
    }

    /// The Arrow schema.
    pub fn schema(self) -> SchemaRef {
        let fields: Vec<Field> = self
            .columns()
            .into_iter()
            .map(|column| Field::new(column.name, column.data_type, column.nullable))
            .collect();
        Arc::new(Schema::new(fields))
    }

    /// The columns whose minimum and maximum are kept in the table's log, so that queries skip files.
    pub const fn statistics_columns(self) -> &'static [&'static str] {
        match self {
            Table::GpuSamples => &["observed_at", "gpu_uuid", "host", "rack", "job_id", "seq", "offset"],
            Table::XidEvents => &["observed_at", "host", "gpu_uuid", "code", "seq", "offset"],
            Table::Ticks => &["observed_at", "offset"],
            Table::Topology => &["observed_at", "group_kind", "group_key", "host", "offset"],
            Table::Incidents => &["observed_at", "host", "gpu_uuid", "kind", "id", "emit_seq", "offset"],
            Table::Losses => &["observed_at", "host", "reason", "offset"],
        }
    }
}

/// Where a row came from: the head of every table.
fn source_columns() -> Vec<Column> {
    vec![
        column("date", Date32, "UTC date of `observed_at`; the only partition column."),
        column("log_id", Utf8, "Which log the row came from: the cluster's id, or that of an embedded broker's run."),
        column("topic", Utf8, "Topic of the record."),
        column("partition", Int32, "Partition of the record."),
        column("offset", Int64, "Offset of the record."),
        column("ingested_at", timestamp(), "Processing time: the broker's time stamp of the record."),
        column("observed_at", timestamp(), "Event time."),
    ]
}

fn host_columns() -> Vec<Column> {
    vec![
        column("host", Utf8, "Host that published the record."),
        column("boot_id", Utf8, "Boot of the host; of an imported file, `file:` and the hash of its content."),
        column("seq", Int64, "The record's number within (host, boot_id)."),
        column("reset_epoch", Int32, "Counts what zeroes the volatile counters."),
        column("collector_version", Utf8, "Version of the collector."),
        nullable("site", Utf8, "Site of the host."),
        nullable("row", Utf8, "Row of the rack."),
        nullable("rack", Utf8, "Rack of the host."),
        nullable("feeds", Utf8, "Power feeds of the host, separated by commas."),
        nullable("driver_version", Utf8, "NVIDIA driver version."),
    ]
}

fn sample_columns() -> Vec<Column> {
    let mut columns = host_columns();
    columns.extend([
        column("tick", Int32, "Position of the tick in its batch."),
        column("tiers", Int32, "Which tiers this row read: 1 fast, 2 slow, 4 health. A null metric of a tier that was read is not supported, or was not available."),
        column("gpu_uuid", Utf8, "Identity of the GPU; `<host>#<index>` where the source has none."),
        nullable("gpu_index", Int32, "Index at the time; a label only."),
        nullable("pci", Utf8, "PCI bus id, `dddddddd:bb:dd`."),
        nullable("model", Utf8, "GPU model."),
        nullable("job_id", Utf8, "Job that the GPU was allocated to."),
        nullable("step", Int64, "Training step that the job reported last."),
        column("power_kind", Utf8, "What `power_draw_milliwatts` averages over: instant, average_one_second or unknown."),
    ]);
    columns.extend(Metric::ALL.iter().map(|metric| {
        let width = match metric.width() {
            Width::Int => Int32,
            Width::Long => Int64,
        };
        nullable(metric.name(), width, metric.doc())
    }));
    columns
}

fn event_columns() -> Vec<Column> {
    let mut columns = host_columns();
    columns.extend([
        column("kind", Utf8, "xid, sxid, fell_off or gpu_lost."),
        nullable("code", Int32, "Xid or SXid number."),
        nullable("gpu_uuid", Utf8, "Identity of the GPU, where the source knows it."),
        nullable("pci", Utf8, "PCI bus id, `dddddddd:bb:dd`."),
        nullable("pid", Int64, "Process that the driver blames."),
        nullable("process", Utf8, "Its name, as the driver prints it."),
        nullable("gpu_instance", Int32, "MIG GPU instance."),
        nullable("compute_instance", Int32, "MIG compute instance."),
        nullable("job_id", Utf8, "Job that the GPU was allocated to."),
        column("message", Utf8, "What the driver said after the code."),
        column("raw", Utf8, "The whole line, as vendors ask for it."),
        nullable("kmsg_sequence", Int64, "Sequence number in the kernel's ring buffer; a gap is a loss."),
        column("time_estimated", Boolean, "The instant was worked out from a stamp that is no wall clock."),
    ]);
    columns
}

fn tick_columns() -> Vec<Column> {
    vec![column("writer", Utf8, "Who wrote the tick: the partition's source of time.")]
}

fn topology_columns() -> Vec<Column> {
    vec![
        column("writer", Utf8, "Who wrote the record."),
        nullable("group_kind", Utf8, "job, power_domain or rack; null in the one row of a record without groups."),
        nullable("group_key", Utf8, "Name of the group: a job id, a rack, or a feed as `site/feed`."),
        nullable("host", Utf8, "Host in the group; null in the one row of a group without hosts."),
        nullable("rating_watts", Int64, "What a power domain may draw for long."),
        column("position", Int32, "Number of the row within its record: groups and hosts in the record's order."),
    ]
}

fn incident_columns() -> Vec<Column> {
    vec![
        column("id", Utf8, "Hash of the log, kind, entity and onset."),
        column("revision", Int32, "Counts the changes of the incident from 0."),
        column("kind", Utf8, "Detector kind; a runbook has the same name."),
        column("state", Utf8, "open or resolved."),
        column("severity", Utf8, "info, warning, major or critical."),
        nullable("site", Utf8, "Site of the host."),
        nullable("rack", Utf8, "Rack of the host."),
        column("host", Utf8, "Host concerned."),
        nullable("gpu_uuid", Utf8, "GPU concerned."),
        nullable("gpu_index", Int32, "Its index at the time."),
        nullable("pci", Utf8, "PCI bus id."),
        nullable("job_id", Utf8, "Job that ran on it."),
        nullable("feed", Utf8, "Power domain, when the incident is about one and no host."),
        nullable("code", Int32, "Xid or SXid."),
        column("onset_at", timestamp(), "When it began."),
        nullable("end_at", timestamp(), "When it ended; null while open."),
        column("decided_at", timestamp(), "Watermark at which this revision was decided."),
        column("late", Boolean, "Its cause arrived after its window had closed."),
        column("statistic", Utf8, "What was measured."),
        column("value", Float64, "What it came to."),
        column("threshold", Float64, "Against what."),
        column("count", Int64, "How many facts the incident gathers."),
        column("summary", Utf8, "The incident in a sentence."),
        column("actions", Utf8, "What to do, most immediate first, separated by semicolons."),
        column("evidence", Utf8, "JSON list of {at, name, value, before, reset}."),
        nullable("explains", Utf8, "What else the cause brought about: JSON list of {kind, code, onset_at, summary}."),
        nullable("coverage", Float64, "Share of the expected hosts that were heard; null where one speaks for itself."),
        nullable("raw", Utf8, "Kernel line that opened it."),
        column("source_topic", Utf8, "Topic of the records that made the case."),
        column("source_partition", Int32, "Their partition."),
        column("first_offset", Int64, "The first of them."),
        column("last_offset", Int64, "The last of them."),
        column("detector", Utf8, "Detector and version."),
        column("task", Utf8, "Detect task that decided."),
        column("emit_seq", Int64, "Counts the task's outputs from 0."),
    ]
}

fn loss_columns() -> Vec<Column> {
    vec![
        nullable("host", Utf8, "Host that lost it, where known."),
        nullable("boot_id", Utf8, "Boot of the host."),
        nullable("seq", Int64, "The record's number within (host, boot_id)."),
        column("stage", Utf8, "Who lost it: collector or archive."),
        column("reason", Utf8, "Why; see the glossary."),
        column("count", Int64, "How many."),
        nullable("detail", Utf8, "Names the first of them."),
    ]
}

/// `docs/reference/tables.md`.
pub fn reference() -> String {
    let mut page = String::from(
        "# Tables of the lake\n\nGenerated from `schemas/src/table.rs` (`UPDATE=1 cargo test --release --workspace --lib`). Do not edit.\n",
    );
    for table in Table::ALL {
        page += &format!(
            "\n## {}\n\n{}\n\n| column | type | null | meaning |\n|---|---|---|---|\n",
            table.name(),
            table.doc()
        );
        for column in table.columns() {
            let data_type = match &column.data_type {
                DataType::Timestamp(..) => "timestamp (µs, UTC)".to_owned(),
                other => other.to_string().to_lowercase(),
            };
            let null = if column.nullable { "yes" } else { "no" };
            page += &format!("| `{}` | {data_type} | {null} | {} |\n", column.name, column.doc);
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_page_is_what_the_definitions_say() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/tables.md");
        if std::env::var_os("UPDATE").is_some() {
            std::fs::write(path, reference()).expect("writes");
        }
        assert_eq!(std::fs::read_to_string(path).unwrap_or_default(), reference(), "refresh with UPDATE=1");
    }

    #[test]
    fn statistics_are_kept_on_columns_that_exist() {
        for table in Table::ALL {
            let schema = table.schema();
            assert!(
                table.statistics_columns().iter().all(|name| schema.column_with_name(name).is_some()),
                "{}",
                table.name()
            );
        }
    }
}
