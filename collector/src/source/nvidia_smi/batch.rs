//! Rows to batches: column-major, one block per GPU, a tick per distinct instant.
//!
//! Takes rows in the order of the file and says when the next one does not fit; gives a [`GpuBatch`] whose origin has
//! host and instant only.

use gpufleet_schemas::instant::SECOND;
use gpufleet_schemas::metric::{METRIC_COUNT, Metric, Tier};
use gpufleet_schemas::record::{GpuBatch, GpuBlock, Labels, Origin, PowerKind, Series};

/// Longest span of a batch, microseconds.
const MAX_SPAN: i64 = SECOND;
const MAX_TICKS: usize = 64;
pub(super) const MAX_GPUS: usize = 1024;

/// One value per metric.
pub(super) type Values = [Option<i64>; METRIC_COUNT];

/// What is known of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Gpu {
    pub(super) host: String,
    pub(super) identity: String,
    pub(super) index: Option<i32>,
    pub(super) pci: Option<String>,
    pub(super) model: Option<String>,
}

pub(super) struct Row {
    pub(super) at: i64,
    pub(super) gpu: Gpu,
    pub(super) driver: Option<String>,
    /// Where the row has a power reading.
    pub(super) power_kind: Option<PowerKind>,
    pub(super) values: Values,
}

struct Block {
    gpu: Gpu,
    power_kind: Option<PowerKind>,
    rows: Vec<(i64, Values)>,
}

/// Rows that will be one batch.
#[derive(Default)]
pub(super) struct Pending {
    driver: Option<String>,
    /// Distinct instants, ascending.
    ticks: Vec<i64>,
    blocks: Vec<Block>,
}

impl Pending {
    /// Whether a row can be in the same batch as those before it.
    pub(super) fn fits(&self, row: &Row) -> bool {
        let (Some(first), Some(last), Some(block)) = (self.ticks.first(), self.ticks.last(), self.blocks.first())
        else {
            return true;
        };
        let span = (*last).max(row.at) - (*first).min(row.at);
        let full = self.ticks.len() >= MAX_TICKS && self.ticks.binary_search(&row.at).is_err();
        if span > MAX_SPAN || full || block.gpu.host != row.gpu.host || self.driver != row.driver {
            return false;
        }
        match self.blocks.iter().find(|block| block.gpu.identity == row.gpu.identity) {
            Some(block) => {
                let kind = block.power_kind.is_none() || row.power_kind.is_none() || block.power_kind == row.power_kind;
                // Two rows of one GPU at one instant are two samples.
                kind && block.gpu == row.gpu && block.rows.iter().all(|(at, _)| *at != row.at)
            }
            None => self.blocks.len() < MAX_GPUS,
        }
    }

    /// Adds a row that fits.
    pub(super) fn add(&mut self, row: Row) {
        if let Err(place) = self.ticks.binary_search(&row.at) {
            self.ticks.insert(place, row.at);
        }
        self.driver = row.driver;
        match self.blocks.iter_mut().find(|block| block.gpu.identity == row.gpu.identity) {
            Some(block) => {
                block.power_kind = block.power_kind.or(row.power_kind);
                block.rows.push((row.at, row.values));
            }
            None => {
                self.blocks.push(Block { gpu: row.gpu, power_kind: row.power_kind, rows: vec![(row.at, row.values)] });
            }
        }
    }

    /// The batch of the rows so far, if any; begins anew.
    pub(super) fn take(&mut self, labels: &Labels) -> Option<GpuBatch> {
        let Pending { driver, ticks, blocks } = std::mem::take(self);
        let base = *ticks.first()?;
        let host = blocks.first()?.gpu.host.clone();
        let labels = Labels { driver_version: driver.or_else(|| labels.driver_version.clone()), ..labels.clone() };
        Some(GpuBatch {
            origin: Origin { host, observed_at: base, ..Origin::default() },
            labels,
            gpus: blocks.into_iter().map(|block| block.finish(&ticks)).collect(),
            ticks: ticks.iter().map(|at| at - base).collect(),
        })
    }
}

impl Block {
    fn finish(mut self, ticks: &[i64]) -> GpuBlock {
        self.rows.sort_by_key(|(at, _)| *at);
        let mut block = GpuBlock {
            gpu_uuid: self.gpu.identity,
            gpu_index: self.gpu.index,
            pci: self.gpu.pci,
            model: self.gpu.model,
            power_kind: self.power_kind.unwrap_or_default(),
            ..GpuBlock::default()
        };
        let position = |at: i64| ticks.binary_search(&at).ok().and_then(|tick| i32::try_from(tick).ok());
        for tier in Tier::ALL {
            let read: Vec<&(i64, Values)> = self.rows.iter().filter(|(_, values)| reads(values, tier)).collect();
            block.tier_ticks[tier as usize] = read.iter().filter_map(|(at, _)| position(*at)).collect();
            for metric in Metric::ALL.iter().filter(|metric| metric.tier() == tier) {
                let series: Vec<Option<i64>> = read.iter().map(|(_, values)| values[metric.index()]).collect();
                block.series[metric.index()] = Series::sparse(&series);
            }
        }
        block
    }
}

/// Whether a row read a tier. A row without any value, such as that of a lost GPU, still keeps its time.
fn reads(values: &Values, tier: Tier) -> bool {
    let any =
        |wanted: Tier| Metric::ALL.iter().any(|metric| metric.tier() == wanted && values[metric.index()].is_some());
    any(tier) || (tier == Tier::Fast && values.iter().all(Option::is_none))
}
