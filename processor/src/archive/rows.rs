//! Records to rows: one growing set of columns per table.
//!
//! A sample is a (gpu, tick) that read at least one tier; metrics that it did not read are null. Rows of a flush are
//! sorted by (gpu, time), which is what makes them small.

mod incidents;
mod time;

use std::sync::Arc;

use arrow::array::{
    ArrayRef, BooleanBuilder, Date32Builder, Int32Builder, Int64Builder, RecordBatch, StringBuilder,
    TimestampMicrosecondBuilder,
};
use arrow::compute::{SortColumn, lexsort_to_indices, take_record_batch};
use arrow::error::ArrowError;
use gpufleet_schemas::instant::date_of;
use gpufleet_schemas::metric::{METRIC_COUNT, Metric, Width};
use gpufleet_schemas::record::{GpuBatch, GpuBlock, Labels, Lost, Origin, XidEvent};
use gpufleet_schemas::table::Table;

pub use incidents::IncidentRows;
pub use time::{TickRows, TopologyRows};

/// Where a row comes from.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    pub log_id: &'a str,
    pub topic: &'a str,
    pub partition: i32,
    pub offset: i64,
    pub ingested_at: i64,
}

struct Instants(TimestampMicrosecondBuilder);

impl Default for Instants {
    fn default() -> Instants {
        Instants(TimestampMicrosecondBuilder::new().with_timezone("UTC"))
    }
}

macro_rules! finish {
    ($($builder:expr),* $(,)?) => { vec![$(Arc::new($builder.finish()) as ArrayRef),*] };
}
pub(crate) use finish;

#[derive(Default)]
struct SourceColumns {
    date: Date32Builder,
    log_id: StringBuilder,
    topic: StringBuilder,
    partition: Int32Builder,
    offset: Int64Builder,
    ingested_at: Instants,
    observed_at: Instants,
}

impl SourceColumns {
    fn push(&mut self, place: Place<'_>, observed_at: i64) {
        self.date.append_value(date_of(observed_at));
        self.log_id.append_value(place.log_id);
        self.topic.append_value(place.topic);
        self.partition.append_value(place.partition);
        self.offset.append_value(place.offset);
        self.ingested_at.0.append_value(place.ingested_at);
        self.observed_at.0.append_value(observed_at);
    }

    fn finish(&mut self) -> Vec<ArrayRef> {
        finish![self.date, self.log_id, self.topic, self.partition, self.offset, self.ingested_at.0, self.observed_at.0]
    }
}

#[derive(Default)]
struct HostColumns {
    host: StringBuilder,
    boot_id: StringBuilder,
    seq: Int64Builder,
    reset_epoch: Int32Builder,
    collector_version: StringBuilder,
    site: StringBuilder,
    row: StringBuilder,
    rack: StringBuilder,
    feeds: StringBuilder,
    driver_version: StringBuilder,
}

impl HostColumns {
    fn push(&mut self, origin: &Origin, labels: &Labels, feeds: Option<&str>) {
        self.host.append_value(&origin.host);
        self.boot_id.append_value(&origin.boot_id);
        self.seq.append_value(origin.seq);
        self.reset_epoch.append_value(origin.reset_epoch);
        self.collector_version.append_value(&origin.collector_version);
        self.site.append_option(labels.site.as_ref());
        self.row.append_option(labels.row.as_ref());
        self.rack.append_option(labels.rack.as_ref());
        self.feeds.append_option(feeds);
        self.driver_version.append_option(labels.driver_version.as_ref());
    }

    fn finish(&mut self) -> Vec<ArrayRef> {
        finish![
            self.host,
            self.boot_id,
            self.seq,
            self.reset_epoch,
            self.collector_version,
            self.site,
            self.row,
            self.rack,
            self.feeds,
            self.driver_version,
        ]
    }
}

fn joined(feeds: &[String]) -> Option<String> {
    (!feeds.is_empty()).then(|| feeds.join(","))
}

enum MetricColumn {
    Int(Int32Builder),
    Long(Int64Builder),
}

impl MetricColumn {
    fn new(metric: Metric) -> MetricColumn {
        match metric.width() {
            Width::Int => MetricColumn::Int(Int32Builder::new()),
            Width::Long => MetricColumn::Long(Int64Builder::new()),
        }
    }

    fn push(&mut self, value: Option<i64>) {
        match self {
            // A source that keeps to the metric's width never sends more; what does not fit is absent, never wrapped.
            MetricColumn::Int(column) => column.append_option(value.and_then(|value| i32::try_from(value).ok())),
            MetricColumn::Long(column) => column.append_option(value),
        }
    }

    fn finish(&mut self) -> ArrayRef {
        match self {
            MetricColumn::Int(column) => Arc::new(column.finish()),
            MetricColumn::Long(column) => Arc::new(column.finish()),
        }
    }
}

/// Rows of `gpu_samples`.
pub struct SampleRows {
    source: SourceColumns,
    host: HostColumns,
    tick: Int32Builder,
    tiers: Int32Builder,
    gpu_uuid: StringBuilder,
    gpu_index: Int32Builder,
    pci: StringBuilder,
    model: StringBuilder,
    job_id: StringBuilder,
    step: Int64Builder,
    power_kind: StringBuilder,
    metrics: [MetricColumn; METRIC_COUNT],
    rows: usize,
}

impl Default for SampleRows {
    fn default() -> SampleRows {
        SampleRows {
            source: SourceColumns::default(),
            host: HostColumns::default(),
            tick: Int32Builder::new(),
            tiers: Int32Builder::new(),
            gpu_uuid: StringBuilder::new(),
            gpu_index: Int32Builder::new(),
            pci: StringBuilder::new(),
            model: StringBuilder::new(),
            job_id: StringBuilder::new(),
            step: Int64Builder::new(),
            power_kind: StringBuilder::new(),
            metrics: std::array::from_fn(|i| MetricColumn::new(Metric::ALL[i])),
            rows: 0,
        }
    }
}

impl SampleRows {
    pub fn push(&mut self, place: Place<'_>, batch: &GpuBatch) {
        let feeds = joined(&batch.labels.feeds);
        for block in &batch.gpus {
            let tiers = batch.tiers(block);
            for (tick, tiers) in tiers.iter().enumerate().filter(|(_, tiers)| **tiers != 0) {
                self.source.push(place, batch.tick_at(tick));
                self.host.push(&batch.origin, &batch.labels, feeds.as_deref());
                self.push_label(block, tick, *tiers);
                self.rows += 1;
            }
            for metric in Metric::ALL {
                self.push_metric(block, *metric, &tiers);
            }
        }
    }

    fn push_label(&mut self, block: &GpuBlock, tick: usize, tiers: u8) {
        self.tick.append_value(i32::try_from(tick).unwrap_or(i32::MAX));
        self.tiers.append_value(i32::from(tiers));
        self.gpu_uuid.append_value(&block.gpu_uuid);
        self.gpu_index.append_option(block.gpu_index);
        self.pci.append_option(block.pci.as_ref());
        self.model.append_option(block.model.as_ref());
        self.job_id.append_option(block.job_id.as_ref());
        self.step.append_option(block.step);
        self.power_kind.append_value(block.power_kind.as_str());
    }

    fn push_metric(&mut self, block: &GpuBlock, metric: Metric, tiers: &[u8]) {
        let (series, bit) = (block.series(metric), metric.tier().bit());
        let column = &mut self.metrics[metric.index()];
        let mut position = 0;
        for mask in tiers.iter().filter(|mask| **mask != 0) {
            if mask & bit == 0 {
                column.push(None);
            } else {
                column.push(series.get(position));
                position += 1;
            }
        }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The rows so far, sorted by (gpu, time); starts anew.
    pub fn finish(&mut self) -> Result<RecordBatch, ArrowError> {
        let mut columns = self.source.finish();
        columns.extend(self.host.finish());
        columns.extend(finish![
            self.tick,
            self.tiers,
            self.gpu_uuid,
            self.gpu_index,
            self.pci,
            self.model,
            self.job_id,
            self.step,
            self.power_kind,
        ]);
        columns.extend(self.metrics.iter_mut().map(MetricColumn::finish));
        self.rows = 0;
        let batch = RecordBatch::try_new(Table::GpuSamples.schema(), columns)?;
        let by = |name: &str| {
            let values = batch.column_by_name(name).cloned();
            values.map(|values| SortColumn { values, options: None })
        };
        let order: Vec<SortColumn> = ["gpu_uuid", "observed_at"].into_iter().filter_map(by).collect();
        let indices = lexsort_to_indices(&order, None)?;
        take_record_batch(&batch, &indices)
    }
}

/// Rows of `xid_events`.
#[derive(Default)]
pub struct EventRows {
    source: SourceColumns,
    host: HostColumns,
    kind: StringBuilder,
    code: Int32Builder,
    gpu_uuid: StringBuilder,
    pci: StringBuilder,
    pid: Int64Builder,
    process: StringBuilder,
    gpu_instance: Int32Builder,
    compute_instance: Int32Builder,
    job_id: StringBuilder,
    message: StringBuilder,
    raw: StringBuilder,
    kmsg_sequence: Int64Builder,
    time_estimated: BooleanBuilder,
    rows: usize,
}

impl EventRows {
    pub fn push(&mut self, place: Place<'_>, event: &XidEvent) {
        self.source.push(place, event.origin.observed_at);
        self.host.push(&event.origin, &event.labels, joined(&event.labels.feeds).as_deref());
        self.kind.append_value(event.kind.as_str());
        self.code.append_option(event.code);
        self.gpu_uuid.append_option(event.gpu_uuid.as_ref());
        self.pci.append_option(event.pci.as_ref());
        self.pid.append_option(event.pid);
        self.process.append_option(event.process.as_ref());
        self.gpu_instance.append_option(event.gpu_instance);
        self.compute_instance.append_option(event.compute_instance);
        self.job_id.append_option(event.job_id.as_ref());
        self.message.append_value(&event.message);
        self.raw.append_value(&event.raw);
        self.kmsg_sequence.append_option(event.kmsg_sequence);
        self.time_estimated.append_value(event.time_estimated);
        self.rows += 1;
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn finish(&mut self) -> Result<RecordBatch, ArrowError> {
        let mut columns = self.source.finish();
        columns.extend(self.host.finish());
        columns.extend(finish![
            self.kind,
            self.code,
            self.gpu_uuid,
            self.pci,
            self.pid,
            self.process,
            self.gpu_instance,
            self.compute_instance,
            self.job_id,
            self.message,
            self.raw,
            self.kmsg_sequence,
            self.time_estimated,
        ]);
        self.rows = 0;
        RecordBatch::try_new(Table::XidEvents.schema(), columns)
    }
}

/// Who lost something, and what.
#[derive(Clone, Copy, Debug)]
pub struct Loss<'a> {
    pub observed_at: i64,
    pub origin: Option<&'a Origin>,
    pub stage: &'a str,
    pub reason: &'a str,
    pub count: i64,
    pub detail: Option<&'a str>,
}

/// Rows of `losses`.
#[derive(Default)]
pub struct LossRows {
    source: SourceColumns,
    host: StringBuilder,
    boot_id: StringBuilder,
    seq: Int64Builder,
    stage: StringBuilder,
    reason: StringBuilder,
    count: Int64Builder,
    detail: StringBuilder,
    rows: usize,
}

impl LossRows {
    pub fn push(&mut self, place: Place<'_>, loss: Loss<'_>) {
        self.source.push(place, loss.observed_at);
        self.host.append_option(loss.origin.map(|origin| &origin.host));
        self.boot_id.append_option(loss.origin.map(|origin| &origin.boot_id));
        self.seq.append_option(loss.origin.map(|origin| origin.seq));
        self.stage.append_value(loss.stage);
        self.reason.append_value(loss.reason);
        self.count.append_value(loss.count);
        self.detail.append_option(loss.detail);
        self.rows += 1;
    }

    /// What the host itself lost before this record.
    pub fn push_origin(&mut self, place: Place<'_>, origin: &Origin) {
        for Lost { reason, count, detail } in &origin.lost {
            let (reason, detail) = (reason.as_str(), detail.as_deref());
            let observed_at = origin.observed_at;
            self.push(
                place,
                Loss { observed_at, origin: Some(origin), stage: "collector", reason, count: *count, detail },
            );
        }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn finish(&mut self) -> Result<RecordBatch, ArrowError> {
        let mut columns = self.source.finish();
        columns.extend(finish![self.host, self.boot_id, self.seq, self.stage, self.reason, self.count, self.detail]);
        self.rows = 0;
        RecordBatch::try_new(Table::Losses.schema(), columns)
    }
}
