//! The metrics of a GPU, each with its rate tier, width and meaning.
//!
//! One table feeds everything that must agree: the fields of `GpuBlock` in `schemas/avro`, the metric columns of
//! `gpu_samples`, the encoder and the decoder. A test holds each against the others. Values are integers in the
//! unit that the name ends with; a metric that a GPU does not support, or that a tick did not read, is absent.

/// How often a metric is read (`docs/reference/tables.md`, column `tiers`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// Every tick, 10 Hz by default.
    Fast,
    /// Once a second by default.
    Slow,
    /// Every 10 s by default.
    Health,
}

impl Tier {
    pub const ALL: [Tier; 3] = [Tier::Fast, Tier::Slow, Tier::Health];

    /// The tier's bit in the `tiers` mask of a sample.
    pub const fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// Width of a metric's column in the lake. The wire has one integer type (a variable-length long).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    Int,
    Long,
}

macro_rules! metrics {
    ($($variant:ident, $name:literal, $tier:ident, $width:ident, $doc:literal;)*) => {
        /// A metric of a GPU. The order is the order of the fields on the wire and of the columns in the lake.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Metric { $(#[doc = $doc] $variant,)* }

        impl Metric {
            pub const ALL: &'static [Metric] = &[$(Metric::$variant,)*];

            /// Field and column name; its last word is the unit.
            pub const fn name(self) -> &'static str {
                match self { $(Metric::$variant => $name,)* }
            }

            pub const fn tier(self) -> Tier {
                match self { $(Metric::$variant => Tier::$tier,)* }
            }

            pub const fn width(self) -> Width {
                match self { $(Metric::$variant => Width::$width,)* }
            }

            /// What the metric means, in one line.
            pub const fn doc(self) -> &'static str {
                match self { $(Metric::$variant => $doc,)* }
            }
        }
    };
}

metrics! {
    PowerDraw, "power_draw_milliwatts", Fast, Int, "Board power; `power_kind` says over which time the sensor averages.";
    ClockSm, "clock_sm_megahertz", Fast, Int, "Current SM clock.";
    ClockMemory, "clock_memory_megahertz", Fast, Int, "Current memory clock.";
    ClocksEventReasons, "clocks_event_reasons", Fast, Long, "NVML clocks event reasons bit mask, raw (0x4 power cap, 0x8 HW slowdown, 0x20 SW thermal, 0x40 HW thermal, 0x80 power brake).";
    TemperatureGpu, "temperature_gpu_celsius", Slow, Int, "GPU core temperature.";
    TemperatureMemory, "temperature_memory_celsius", Slow, Int, "HBM temperature, where the board has that sensor.";
    UtilizationGpu, "utilization_gpu_percent", Slow, Int, "Share of the sensor's period with a kernel running; a spinning kernel counts as busy.";
    UtilizationMemory, "utilization_memory_percent", Slow, Int, "Share of the sensor's period with memory traffic.";
    MemoryUsed, "memory_used_bytes", Slow, Long, "Device memory in use.";
    MemoryTotal, "memory_total_bytes", Slow, Long, "Device memory installed.";
    PowerLimit, "power_limit_milliwatts", Slow, Int, "Enforced power limit.";
    Energy, "energy_millijoules", Slow, Long, "Counter: energy since the driver was loaded.";
    FanSpeed, "fan_speed_percent", Slow, Int, "Fan speed; absent on passively cooled boards.";
    PerformanceState, "performance_state", Slow, Int, "P-state, 0 (fastest) to 15.";
    EccSbeVolatile, "ecc_sbe_volatile", Health, Long, "Counter: corrected ECC errors since the driver was loaded.";
    EccDbeVolatile, "ecc_dbe_volatile", Health, Long, "Counter: uncorrected ECC errors since the driver was loaded.";
    EccSbeAggregate, "ecc_sbe_aggregate", Health, Long, "Counter: corrected ECC errors over the board's life.";
    EccDbeAggregate, "ecc_dbe_aggregate", Health, Long, "Counter: uncorrected ECC errors over the board's life.";
    RowRemapCorrected, "row_remap_corrected", Health, Int, "Rows remapped because of corrected errors.";
    RowRemapUncorrected, "row_remap_uncorrected", Health, Int, "Rows remapped because of uncorrected errors.";
    RowRemapPending, "row_remap_pending", Health, Int, "1 when a remapping waits for a GPU reset.";
    RowRemapFailed, "row_remap_failed", Health, Int, "1 when a remapping failed: no spare row is left.";
    PcieReplayCount, "pcie_replay_count", Health, Long, "Counter: PCIe replays since the driver was loaded.";
    PcieLinkGen, "pcie_link_gen", Health, Int, "Current PCIe generation; idle links drop.";
    PcieLinkWidth, "pcie_link_width", Health, Int, "Current PCIe lanes.";
}

/// How many metrics there are.
pub const METRIC_COUNT: usize = Metric::ALL.len();

impl Metric {
    /// Position in [`Metric::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }

    pub fn by_name(name: &str) -> Option<Metric> {
        Metric::ALL.iter().copied().find(|metric| metric.name() == name)
    }
}

/// A set of metrics, for a reader that wants only some of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetricSet(u64);

impl MetricSet {
    pub const ALL: MetricSet = MetricSet((1 << METRIC_COUNT) - 1);
    pub const NONE: MetricSet = MetricSet(0);

    pub const fn of(metrics: &[Metric]) -> MetricSet {
        let mut bits = 0;
        let mut i = 0;
        while i < metrics.len() {
            bits |= 1 << metrics[i].index();
            i += 1;
        }
        MetricSet(bits)
    }

    pub const fn contains(self, metric: Metric) -> bool {
        self.0 & (1 << metric.index()) != 0
    }

    pub const fn union(self, other: MetricSet) -> MetricSet {
        MetricSet(self.0 | other.0)
    }
}
