//! The records that flow through gpufleet, as readers and writers hold them in memory.
//!
//! Their Avro forms lie in `schemas/avro`; [`crate::wire`] turns one into the other. Instants are microseconds UTC.
//! Nothing here reads a clock or does I/O.

use serde::{Deserialize, Serialize};

use crate::metric::{METRIC_COUNT, Metric, Tier};

/// Where and when a record was made, and what was lost since the last one. Opens every record of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    pub host: String,
    /// Identity of the host's boot; of a recording, its content (`file:<sha256>`).
    pub boot_id: String,
    /// One counter per (host, boot) over all record types; a repeat is a duplicate.
    pub seq: i64,
    /// Counts what zeroes the host's volatile counters, such as driver loads, since the boot.
    pub reset_epoch: i32,
    pub collector_version: String,
    /// Event time; of a batch, the base that its ticks count from.
    pub observed_at: i64,
    pub lost: Vec<Lost>,
}

/// Something that was meant to be published and was not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lost {
    pub reason: LostReason,
    pub count: i64,
    /// Names the first of them, for a person: a file and line, a field, a queue.
    pub detail: Option<String>,
}

/// A closed vocabulary with its Avro and SQL spelling. The first variant is the Avro default symbol.
macro_rules! vocabulary {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum $name {
            /// Written by a later version than this reader.
            #[default]
            Unknown,
            $($(#[$doc])* $variant,)*
        }

        impl $name {
            pub const ALL: &'static [$name] = &[$name::Unknown, $($name::$variant,)*];

            pub const fn as_str(self) -> &'static str {
                match self { $name::Unknown => "unknown", $($name::$variant => $text,)* }
            }

            pub fn from_text(text: &str) -> $name {
                match text { $($text => $name::$variant,)* _ => $name::Unknown }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }
    };
}

vocabulary! {
    /// Why something was lost (law L4: nothing vanishes).
    LostReason {
        /// A cell of a file could not be read; its value is absent.
        UnreadableCell = "unreadable_cell",
        /// A line or row of a file could not be used at all.
        UnreadableLine = "unreadable_line",
        /// The last line of a file, or one longer than the bound, was cut.
        CutLine = "cut_line",
        /// A bounded queue was full.
        QueueFull = "queue_full",
        /// The kernel's ring buffer overran before it was read.
        KernelLogOverrun = "kernel_log_overrun",
        /// A column of a file names nothing that gpufleet keeps.
        UnknownColumn = "unknown_column",
    }
}

vocabulary! {
    /// What a power reading averages over (NVML header: fields 185, 186 and `nvmlDeviceGetPowerUsage`).
    PowerKind {
        Instant = "instant",
        AverageOneSecond = "average_one_second",
    }
}

vocabulary! {
    /// What a host event is.
    EventKind {
        Xid = "xid",
        /// NVSwitch error.
        Sxid = "sxid",
        FellOff = "fell_off",
        /// NVML answers "GPU is lost".
        GpuLost = "gpu_lost",
    }
}

vocabulary! {
    /// How bad an incident is; ordered.
    Severity {
        Info = "info",
        Warning = "warning",
        Major = "major",
        Critical = "critical",
    }
}

vocabulary! {
    /// Where an incident stands in its life.
    State {
        Open = "open",
        Resolved = "resolved",
    }
}

vocabulary! {
    /// What a set of hosts has in common.
    GroupKind {
        Job = "job",
        PowerDomain = "power_domain",
        Rack = "rack",
    }
}

/// Where a host stands. Travels in every record, so that no reader needs a join.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels {
    pub site: Option<String>,
    pub row: Option<String>,
    pub rack: Option<String>,
    /// Power feeds of the host, such as `A` and `B`.
    pub feeds: Vec<String>,
    pub driver_version: Option<String>,
}

impl Origin {
    /// The record comes from a file, and `boot_id` names its content.
    pub fn recorded(&self) -> bool {
        self.boot_id.starts_with("file:")
    }

    /// Back to the defaults, keeping what was allocated.
    pub(crate) fn clear(&mut self) {
        self.host.clear();
        self.boot_id.clear();
        self.seq = 0;
        self.reset_epoch = 0;
        self.collector_version.clear();
        self.observed_at = 0;
        self.lost.clear();
    }
}

impl Labels {
    pub(crate) fn clear(&mut self) {
        *self = Labels::default();
    }
}

/// The readings of one metric over the ticks of its tier. Empty means: not supported, or not read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Series {
    /// One value per tick of the tier; the value of an absent tick is 0 and means nothing.
    pub values: Vec<i64>,
    /// Which ticks have a value; empty when all have.
    pub present: Vec<bool>,
}

impl Series {
    /// Every tick has a value.
    pub fn dense(values: Vec<i64>) -> Series {
        Series { values, present: Vec::new() }
    }

    /// Ticks without a value are `None`. All `None` gives the empty series.
    pub fn sparse(values: &[Option<i64>]) -> Series {
        if values.iter().all(Option::is_none) {
            return Series::default();
        }
        let present =
            if values.iter().all(Option::is_some) { Vec::new() } else { values.iter().map(Option::is_some).collect() };
        Series { values: values.iter().map(|value| value.unwrap_or(0)).collect(), present }
    }

    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// The value at the tier's `i`-th tick.
    pub fn get(&self, i: usize) -> Option<i64> {
        let value = *self.values.get(i)?;
        (self.present.is_empty() || self.present[i]).then_some(value)
    }

    pub(crate) fn clear(&mut self) {
        self.values.clear();
        self.present.clear();
    }
}

/// One GPU's part of a batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuBlock {
    /// Identity. Where a source has none, `<host>#<index>`.
    pub gpu_uuid: String,
    /// A label only: indices change with the driver.
    pub gpu_index: Option<i32>,
    /// `dddddddd:bb:dd`, lower case.
    pub pci: Option<String>,
    pub model: Option<String>,
    pub job_id: Option<String>,
    pub step: Option<i64>,
    pub power_kind: PowerKind,
    /// Positions in the batch's ticks at which each tier was read, ascending; indexed by [`Tier`].
    pub tier_ticks: [Vec<i32>; 3],
    pub series: [Series; METRIC_COUNT],
}

impl GpuBlock {
    pub fn series(&self, metric: Metric) -> &Series {
        &self.series[metric.index()]
    }

    pub fn ticks(&self, tier: Tier) -> &[i32] {
        &self.tier_ticks[tier as usize]
    }

    /// The (tick position, value) pairs of one metric, absent ones left out.
    pub fn readings(&self, metric: Metric) -> impl Iterator<Item = (usize, i64)> + '_ {
        let series = self.series(metric);
        let count = series.values.len();
        self.ticks(metric.tier())
            .iter()
            .take(count)
            .enumerate()
            .filter_map(|(i, tick)| Some((usize::try_from(*tick).ok()?, series.get(i)?)))
    }

    pub(crate) fn clear(&mut self) {
        self.gpu_uuid.clear();
        self.gpu_index = None;
        self.pci = None;
        self.model = None;
        self.job_id = None;
        self.step = None;
        self.power_kind = PowerKind::Unknown;
        self.tier_ticks.iter_mut().for_each(Vec::clear);
        self.series.iter_mut().for_each(Series::clear);
    }
}

/// Everything one host read from its GPUs between two flushes, column-major.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuBatch {
    pub origin: Origin,
    pub labels: Labels,
    /// Microseconds after `origin.observed_at`, ascending, one per tick.
    pub ticks: Vec<i64>,
    pub gpus: Vec<GpuBlock>,
}

impl GpuBatch {
    /// The instant of the `tick`-th tick.
    pub fn tick_at(&self, tick: usize) -> i64 {
        self.origin.observed_at.saturating_add(self.ticks.get(tick).copied().unwrap_or(0))
    }

    /// Which tiers a (gpu, tick) read, as a bit mask per tick. A tick with no bit is no sample.
    pub fn tiers(&self, block: &GpuBlock) -> Vec<u8> {
        let mut mask = vec![0u8; self.ticks.len()];
        for tier in Tier::ALL {
            for tick in block.ticks(tier) {
                if let Some(bits) = usize::try_from(*tick).ok().and_then(|tick| mask.get_mut(tick)) {
                    *bits |= tier.bit();
                }
            }
        }
        mask
    }

    /// How many samples, that is rows of `gpu_samples`, the batch holds.
    pub fn sample_count(&self) -> usize {
        self.gpus.iter().map(|block| self.tiers(block).iter().filter(|bits| **bits != 0).count()).sum()
    }
}

/// A fact that a host's kernel log, or NVML, reported at an instant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct XidEvent {
    pub origin: Origin,
    pub labels: Labels,
    pub kind: EventKind,
    pub code: Option<i32>,
    pub gpu_uuid: Option<String>,
    /// `dddddddd:bb:dd`, lower case.
    pub pci: Option<String>,
    pub pid: Option<i64>,
    pub process: Option<String>,
    pub gpu_instance: Option<i32>,
    pub compute_instance: Option<i32>,
    pub job_id: Option<String>,
    /// What the driver said after the code.
    pub message: String,
    /// The whole line, as vendors ask for it.
    pub raw: String,
    /// Sequence number of the kernel's ring buffer; a gap is a loss.
    pub kmsg_sequence: Option<i64>,
    /// The instant was worked out from a stamp that is not a wall clock.
    pub time_estimated: bool,
}

/// Time as a record: one per partition per second, in the time of the partition's source.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tick {
    pub tick_at: i64,
    pub writer: String,
}

/// The layout of the fleet from an instant on: an epoch record. It enters every partition of the telemetry topic
/// whenever it changes, so that no reader needs a second input.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    pub epoch_at: i64,
    pub writer: String,
    pub groups: Vec<Group>,
}

/// Hosts that belong together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    pub kind: GroupKind,
    /// Name of the group: a job id, a rack, or a feed as `site/feed`.
    pub key: String,
    pub hosts: Vec<String>,
    /// What a power domain may draw for long.
    pub rating_watts: Option<i64>,
}

/// Everything that the telemetry topic carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Telemetry {
    Batch(GpuBatch),
    Event(XidEvent),
    Tick(Tick),
    Topology(Topology),
}

/// One host's part in a group over one pane: what stage 1 tells stage 2.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Partial {
    /// Who computed it, and its number among that task's outputs: a reader drops what it has seen.
    pub task: String,
    pub emit_seq: i64,
    pub group: GroupKind,
    pub key: String,
    pub host: String,
    /// Start of the pane.
    pub pane_at: i64,
    /// GPUs that were read in the pane, and how many samples they gave.
    pub gpus: i32,
    pub samples: i64,
    /// The host's share of the group's load in each second of the pane; none in a second without a sample.
    pub milliwatts: Vec<Option<i64>>,
    /// Input offsets that it rests on.
    pub first_offset: i64,
    pub last_offset: i64,
}

/// How far an upstream task has come, written to every partition of stage 2.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Watermark {
    pub task: String,
    pub emit_seq: i64,
    pub watermark_at: i64,
}

/// A stage-2 task gives up waiting for an upstream task that is silent; an explicit record, so that replays agree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exclusion {
    /// Who decided.
    pub task: String,
    pub emit_seq: i64,
    pub excluded: String,
    /// Where the excluded task stood.
    pub watermark_at: i64,
}

/// Everything that the partials topic carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Upstream {
    Partial(Partial),
    Watermark(Watermark),
    Exclusion(Exclusion),
    /// Passed on from stage 1, with the number that its task gave it.
    Topology {
        task: String,
        emit_seq: i64,
        topology: Topology,
    },
}

impl Telemetry {
    /// Event time of the record's newest fact.
    pub fn newest_at(&self) -> i64 {
        match self {
            Telemetry::Batch(batch) => batch.tick_at(batch.ticks.len().saturating_sub(1)),
            Telemetry::Event(event) => event.origin.observed_at,
            Telemetry::Tick(tick) => tick.tick_at,
            Telemetry::Topology(topology) => topology.epoch_at,
        }
    }
}

/// One reading or counter that made the case for an incident.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evidence {
    pub at: i64,
    /// A metric, or what was counted.
    pub name: String,
    pub value: i64,
    /// Before this instant the counter was here; null for a plain reading.
    pub before: Option<i64>,
    /// The counter was zeroed in between.
    pub reset: bool,
}

/// Something that would be an incident, had it not the cause of another.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explained {
    pub kind: String,
    pub code: Option<i32>,
    pub onset_at: i64,
    pub summary: String,
}

/// A span in which something was wrong, with its evidence and its life. One revision of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Incident {
    /// Hash of the log, kind, entity and onset: a replay gives the same.
    pub id: String,
    pub revision: i32,
    pub kind: String,
    pub state: State,
    pub severity: Severity,
    pub site: Option<String>,
    pub rack: Option<String>,
    pub host: String,
    pub gpu_uuid: Option<String>,
    pub gpu_index: Option<i32>,
    pub pci: Option<String>,
    pub job_id: Option<String>,
    /// Power domain, when the incident is about one and no host.
    pub feed: Option<String>,
    /// Xid or SXid.
    pub code: Option<i32>,
    pub onset_at: i64,
    /// Null while open.
    pub end_at: Option<i64>,
    /// Watermark at which this revision was decided: log time, not wall time.
    pub decided_at: i64,
    /// Arrived after its window had closed.
    pub late: bool,
    /// What was measured, and against what.
    pub statistic: String,
    pub value: f64,
    pub threshold: f64,
    /// How many facts the incident gathers.
    pub count: i64,
    pub summary: String,
    /// What to do, most immediate first.
    pub actions: Vec<String>,
    pub evidence: Vec<Evidence>,
    /// What else this cause brought about; none of it has a page of its own.
    pub explains: Vec<Explained>,
    /// Share of the expected hosts that were heard; none where one host speaks for itself.
    pub coverage: Option<f64>,
    /// Kernel line that opened it.
    pub raw: Option<String>,
    pub log_id: String,
    pub topic: String,
    pub partition: i32,
    pub first_offset: i64,
    pub last_offset: i64,
    /// Who decided: detector name and version.
    pub detector: String,
    /// `<log_id>/<topic>/<partition>`.
    pub task: String,
    /// Counts the task's outputs from 0; a reader drops what it has seen.
    pub emit_seq: i64,
}
