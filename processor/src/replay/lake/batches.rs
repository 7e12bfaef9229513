//! Rows of `gpu_samples` to batches: rows with one offset are one record.
//!
//! The rows come sorted by GPU, and a batch that crosses midnight lies in two files, so nothing is complete before the
//! last row was seen.

use std::collections::BTreeMap;

use arrow::array::{Int32Array, Int64Array, StringArray};
use gpufleet_runtime::exit::Failure;
use gpufleet_schemas::metric::{Metric, MetricSet, Tier, Width};
use gpufleet_schemas::record::{GpuBatch, GpuBlock, Labels, Origin, PowerKind, Series, Telemetry};

use super::Kept;
use super::columns::{Columns, HostColumns, SourceColumns, number, owned, text};

const GPU_COLUMNS: [&str; 9] =
    ["tick", "tiers", "gpu_uuid", "gpu_index", "pci", "model", "job_id", "step", "power_kind"];

/// The batches of a partition, growing.
pub(super) struct Batches {
    wanted: Vec<Metric>,
    records: BTreeMap<i64, Gathering>,
}

struct Gathering {
    appended_at: i64,
    origin: Origin,
    labels: Labels,
    gpus: Vec<Gpu>,
}

struct Gpu {
    /// Its labels; ticks and series come last.
    block: GpuBlock,
    cells: Vec<Cell>,
    /// As many values per cell as metrics are wanted.
    values: Vec<Option<i64>>,
}

/// One row, less its values.
#[derive(Clone, Copy)]
struct Cell {
    tick: i32,
    at: i64,
    tiers: u8,
}

impl Batches {
    pub(super) fn of(wanted: MetricSet) -> Batches {
        let wanted = Metric::ALL.iter().copied().filter(|metric| wanted.contains(*metric)).collect();
        Batches { wanted, records: BTreeMap::new() }
    }

    /// The columns that rows must have.
    pub(super) fn names(&self) -> Vec<&'static str> {
        let metrics = self.wanted.iter().map(|metric| metric.name());
        SourceColumns::NAMES.into_iter().chain(HostColumns::NAMES).chain(GPU_COLUMNS).chain(metrics).collect()
    }

    pub(super) fn add(&mut self, rows: &Columns<'_>) -> Result<(), Failure> {
        let columns = SampleColumns::of(rows, &self.wanted)?;
        for i in 0..rows.len() {
            let gathering = self.records.entry(columns.source.offset.value(i)).or_insert_with(|| Gathering {
                appended_at: columns.source.appended_at.value(i),
                origin: columns.host.origin(i, 0),
                labels: columns.host.labels(i),
                gpus: Vec::new(),
            });
            // From the end, because rows of one GPU stand together.
            let known = gathering.gpus.iter().rposition(|gpu| columns.is_of(&gpu.block, i));
            let at = known.unwrap_or(gathering.gpus.len());
            if known.is_none() {
                gathering.gpus.push(Gpu { block: columns.block(i), cells: Vec::new(), values: Vec::new() });
            }
            let gpu = &mut gathering.gpus[at];
            gpu.cells.push(columns.cell(i));
            gpu.values.extend(columns.metrics.iter().map(|metric| metric.value(i)));
        }
        Ok(())
    }

    pub(super) fn finish(self) -> Vec<Kept> {
        let Batches { wanted, records } = self;
        let kept = |(offset, gathering): (i64, Gathering)| Kept {
            offset,
            appended_at: gathering.appended_at,
            record: Telemetry::Batch(gathering.finish(&wanted)),
        };
        records.into_iter().map(kept).collect()
    }
}

impl Gathering {
    fn finish(mut self, wanted: &[Metric]) -> GpuBatch {
        let mut ticks: Vec<(i32, i64)> =
            self.gpus.iter().flat_map(|gpu| gpu.cells.iter().map(|cell| (cell.tick, cell.at))).collect();
        ticks.sort_unstable();
        ticks.dedup_by_key(|(tick, _)| *tick);
        let base = ticks.first().map_or(0, |(_, at)| *at);
        for gpu in &mut self.gpus {
            gpu.sort(wanted.len());
        }
        self.gpus.sort_by(|a, b| a.place().cmp(&b.place()));
        GpuBatch {
            origin: Origin { observed_at: base, ..self.origin },
            labels: self.labels,
            gpus: self.gpus.into_iter().map(|gpu| gpu.finish(&ticks, wanted)).collect(),
            ticks: ticks.iter().map(|(_, at)| at.saturating_sub(base)).collect(),
        }
    }
}

impl Gpu {
    /// Where it stands in its batch.
    fn place(&self) -> (Option<i32>, &str, Option<i32>) {
        (self.block.gpu_index, self.block.gpu_uuid.as_str(), self.cells.first().map(|cell| cell.tick))
    }

    /// Brings the cells into the order of their ticks; within a file they are.
    fn sort(&mut self, width: usize) {
        if self.cells.is_sorted_by_key(|cell| cell.tick) {
            return;
        }
        let mut order: Vec<usize> = (0..self.cells.len()).collect();
        order.sort_by_key(|nth| self.cells[*nth].tick);
        self.values = order.iter().flat_map(|nth| self.values[nth * width..(nth + 1) * width].to_vec()).collect();
        self.cells = order.iter().map(|nth| self.cells[*nth]).collect();
    }

    /// The block, with the positions of its ticks among those of the batch.
    fn finish(self, ticks: &[(i32, i64)], wanted: &[Metric]) -> GpuBlock {
        let Gpu { mut block, cells, values } = self;
        let position = |cell: &Cell| {
            let position = ticks.partition_point(|(tick, _)| *tick < cell.tick);
            i32::try_from(position).unwrap_or(i32::MAX)
        };
        for tier in Tier::ALL {
            let read: Vec<usize> = (0..cells.len()).filter(|nth| cells[*nth].tiers & tier.bit() != 0).collect();
            block.tier_ticks[tier as usize] = read.iter().map(|nth| position(&cells[*nth])).collect();
            for (column, metric) in wanted.iter().enumerate().filter(|(_, metric)| metric.tier() == tier) {
                let series: Vec<Option<i64>> = read.iter().map(|nth| values[nth * wanted.len() + column]).collect();
                block.series[metric.index()] = Series::sparse(&series);
            }
        }
        block
    }
}

enum MetricColumn<'a> {
    Int(&'a Int32Array),
    Long(&'a Int64Array),
}

impl MetricColumn<'_> {
    fn value(&self, i: usize) -> Option<i64> {
        match self {
            MetricColumn::Int(column) => number(column, i).map(i64::from),
            MetricColumn::Long(column) => number(column, i),
        }
    }
}

struct SampleColumns<'a> {
    source: SourceColumns<'a>,
    host: HostColumns<'a>,
    tick: &'a Int32Array,
    tiers: &'a Int32Array,
    gpu_uuid: &'a StringArray,
    gpu_index: &'a Int32Array,
    pci: &'a StringArray,
    model: &'a StringArray,
    job_id: &'a StringArray,
    step: &'a Int64Array,
    power_kind: &'a StringArray,
    metrics: Vec<MetricColumn<'a>>,
}

impl<'a> SampleColumns<'a> {
    fn of(rows: &Columns<'a>, wanted: &[Metric]) -> Result<SampleColumns<'a>, Failure> {
        let metric = |metric: &Metric| match metric.width() {
            Width::Int => rows.int(metric.name()).map(MetricColumn::Int),
            Width::Long => rows.long(metric.name()).map(MetricColumn::Long),
        };
        Ok(SampleColumns {
            source: SourceColumns::of(rows)?,
            host: HostColumns::of(rows)?,
            tick: rows.int("tick")?,
            tiers: rows.int("tiers")?,
            gpu_uuid: rows.text("gpu_uuid")?,
            gpu_index: rows.int("gpu_index")?,
            pci: rows.text("pci")?,
            model: rows.text("model")?,
            job_id: rows.text("job_id")?,
            step: rows.long("step")?,
            power_kind: rows.text("power_kind")?,
            metrics: wanted.iter().map(metric).collect::<Result<_, Failure>>()?,
        })
    }

    /// The row is of that block: a batch may hold two blocks of one GPU that differ in a label.
    fn is_of(&self, block: &GpuBlock, i: usize) -> bool {
        self.gpu_uuid.value(i) == block.gpu_uuid
            && number(self.gpu_index, i) == block.gpu_index
            && text(self.pci, i) == block.pci.as_deref()
            && text(self.model, i) == block.model.as_deref()
            && text(self.job_id, i) == block.job_id.as_deref()
            && number(self.step, i) == block.step
            && PowerKind::from_text(self.power_kind.value(i)) == block.power_kind
    }

    fn block(&self, i: usize) -> GpuBlock {
        GpuBlock {
            gpu_uuid: self.gpu_uuid.value(i).to_owned(),
            gpu_index: number(self.gpu_index, i),
            pci: owned(self.pci, i),
            model: owned(self.model, i),
            job_id: owned(self.job_id, i),
            step: number(self.step, i),
            power_kind: PowerKind::from_text(self.power_kind.value(i)),
            ..GpuBlock::default()
        }
    }

    fn cell(&self, i: usize) -> Cell {
        Cell {
            tick: self.tick.value(i),
            at: self.source.observed_at.value(i),
            tiers: u8::try_from(self.tiers.value(i)).unwrap_or(0),
        }
    }
}
