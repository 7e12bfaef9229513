//! One simulated GPU: power from the job's steps, temperature from power and airflow, clocks from temperature.
//!
//! Figures are those of an H100 SXM in `docs/reference/simulator.md`: 700 W limit, about 690 W in a step and a dip at its
//! boundary, one thermal pole of 40 s, software slowdown from 87 °C until below 85 °C.

use gpufleet_schemas::instant::SECOND;
use gpufleet_schemas::metric::{METRIC_COUNT, Metric, Tier};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::fault::Fault;
use super::ledger::Ledger;

const LIMIT_WATTS: f64 = 700.0;
const INLET_CELSIUS: f64 = 27.0;
const TAU_SECONDS: f64 = 40.0;
const SLOWDOWN_CELSIUS: f64 = 87.0;
const RELEASE_CELSIUS: f64 = 85.0;
const STEP_SECONDS: f64 = 10.5;
const MAX_SM_MEGAHERTZ: i64 = 1980;
const THROTTLED_MEGAHERTZ: i64 = 1230;

pub(super) struct Gpu {
    pub(super) uuid: String,
    pub(super) pci: String,
    /// Off the bus: nothing reads it any more.
    pub(super) lost: bool,
    rng: ChaCha8Rng,
    celsius: f64,
    /// Thermal resistance, °C/W.
    resistance: f64,
    healthy_resistance: f64,
    blocked_until: i64,
    watts: f64,
    energy_millijoules: f64,
    throttled: bool,
    capped: bool,
    slowdown_until: i64,
    counters: Counters,
    /// Corrected errors still to come: next instant and how many.
    burst: Option<(i64, i64, u32)>,
}

#[derive(Default)]
struct Counters {
    sbe_volatile: i64,
    dbe_volatile: i64,
    sbe_aggregate: i64,
    dbe_aggregate: i64,
    remap_uncorrected: i64,
    remap_pending: i64,
    replays: i64,
    /// Counts that the ledger has not seen a reading of yet.
    unlabelled_sbe: i64,
    unlabelled_dbe: i64,
}

impl Gpu {
    pub(super) fn new(seed: u64, host: usize, index: usize) -> Gpu {
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ (host as u64) << 32 ^ (index as u64) << 24 ^ 0x6770_7566);
        let (a, b): (u32, u64) = (rng.random(), rng.random());
        let resistance = rng.random_range(0.040..0.052);
        let mut counters = Counters::default();
        // Boards have a history: a counter that is not zero is no error of today.
        counters.sbe_volatile = rng.random_range(0..4);
        counters.sbe_aggregate = counters.sbe_volatile + rng.random_range(0..40);
        counters.dbe_volatile = i64::from(rng.random_range(0..20) == 0);
        counters.dbe_aggregate = counters.dbe_volatile;
        Gpu {
            uuid: format!("GPU-{a:08x}-{:04x}-{host:04x}-{index:04x}-{:012x}", b as u16, b >> 16),
            pci: format!("00000000:{:02x}:00", 0x1b + index * 0x12),
            lost: false,
            celsius: INLET_CELSIUS + 20.0,
            resistance,
            healthy_resistance: resistance,
            blocked_until: 0,
            watts: 120.0,
            energy_millijoules: 1e9 + rng.random_range(0.0..1e9),
            throttled: false,
            capped: false,
            slowdown_until: 0,
            counters,
            burst: None,
            rng,
        }
    }

    pub(super) fn throttled(&self) -> bool {
        self.throttled
    }

    pub(super) fn apply(&mut self, fault: &Fault) {
        match fault {
            Fault::BlockedAirflow { at, span } => {
                self.resistance = 0.097;
                self.blocked_until = at + span;
            }
            Fault::HotButUnthrottled => {
                self.resistance = 0.082;
                self.healthy_resistance = 0.082;
            }
            Fault::PowerCap => self.capped = true,
            Fault::PstateChange { at } => self.slowdown_until = at + SECOND / 2,
            Fault::Uncorrectable => {
                self.counters.dbe_volatile += 1;
                self.counters.dbe_aggregate += 1;
                self.counters.remap_uncorrected += 1;
                self.counters.remap_pending = 1;
                self.counters.unlabelled_dbe += 1;
            }
            Fault::CorrectableBurst { at, errors } => self.burst = Some((*at, 45 * SECOND, *errors)),
            Fault::OneCorrectable => {
                self.counters.sbe_volatile += 1;
                self.counters.sbe_aggregate += 1;
            }
            Fault::OffTheBus => self.lost = true,
            Fault::ApplicationXid { .. } | Fault::QuotedXid | Fault::InformationXid | Fault::DriverReload => {}
        }
    }

    /// A driver that is loaded again counts from zero.
    pub(super) fn reload_driver(&mut self) {
        self.counters.sbe_volatile = 0;
        self.counters.dbe_volatile = 0;
        self.counters.replays = 0;
        self.energy_millijoules = 0.0;
    }

    /// Goes on by one tick of `tick` microseconds, to `at` microseconds after the start.
    pub(super) fn step(&mut self, at: i64, tick: i64) {
        let seconds = tick as f64 / SECOND as f64;
        if self.blocked_until != 0 && at >= self.blocked_until {
            self.resistance = self.healthy_resistance;
            self.blocked_until = 0;
        }
        let phase = (at as f64 / SECOND as f64 / STEP_SECONDS).fract();
        let demand: f64 = if phase < 0.87 { 690.0 } else { 430.0 };
        let noise = self.rng.random_range(-6.0..6.0);
        let slow = if self.throttled { 0.62 } else { 1.0 };
        self.watts = (demand * slow + noise).min(LIMIT_WATTS);
        let target = INLET_CELSIUS + self.resistance * self.watts;
        self.celsius += (target - self.celsius) * (1.0 - (-seconds / TAU_SECONDS).exp());
        self.throttled = if self.throttled { self.celsius > RELEASE_CELSIUS } else { self.celsius >= SLOWDOWN_CELSIUS };
        self.energy_millijoules += self.watts * seconds * 1000.0;
        if let Some((next, gap, left)) = self.burst.filter(|(next, ..)| at >= *next) {
            self.counters.sbe_volatile += 1;
            self.counters.sbe_aggregate += 1;
            self.counters.unlabelled_sbe += 1;
            self.burst = (left > 1).then_some((next + gap, gap, left - 1));
        }
        self.slowdown_until = if at > self.slowdown_until { 0 } else { self.slowdown_until };
    }

    /// Appends the readings of one tier; what the reading shows of a planted fault goes into the ledger.
    pub(super) fn read(
        &mut self,
        tier: Tier,
        at: i64,
        values: &mut [Vec<i64>; METRIC_COUNT],
        ledger: &mut Ledger,
        host: &str,
    ) {
        let mut push = |metric: Metric, value: i64| values[metric.index()].push(value);
        match tier {
            Tier::Fast => {
                let clock = if self.throttled {
                    THROTTLED_MEGAHERTZ
                } else {
                    MAX_SM_MEGAHERTZ - if self.capped { 45 } else { 0 }
                };
                push(Metric::PowerDraw, (self.watts * 1000.0) as i64);
                push(Metric::ClockSm, clock);
                push(Metric::ClockMemory, 2619);
                push(Metric::ClocksEventReasons, self.reasons());
            }
            Tier::Slow => {
                push(Metric::TemperatureGpu, self.celsius.round() as i64);
                push(Metric::TemperatureMemory, (self.celsius + 8.0).round() as i64);
                push(Metric::UtilizationGpu, 100);
                push(Metric::UtilizationMemory, 60 + self.rng.random_range(0..8));
                push(Metric::MemoryUsed, 71_303_168_000);
                push(Metric::MemoryTotal, 85_520_809_984);
                push(Metric::PowerLimit, (LIMIT_WATTS * 1000.0) as i64);
                push(Metric::Energy, self.energy_millijoules as i64);
                push(Metric::PerformanceState, 0);
            }
            Tier::Health => {
                let counters = &mut self.counters;
                push(Metric::EccSbeVolatile, counters.sbe_volatile);
                push(Metric::EccDbeVolatile, counters.dbe_volatile);
                push(Metric::EccSbeAggregate, counters.sbe_aggregate);
                push(Metric::EccDbeAggregate, counters.dbe_aggregate);
                push(Metric::RowRemapCorrected, 0);
                push(Metric::RowRemapUncorrected, counters.remap_uncorrected);
                push(Metric::RowRemapPending, counters.remap_pending);
                push(Metric::RowRemapFailed, 0);
                push(Metric::PcieReplayCount, counters.replays);
                push(Metric::PcieLinkGen, 5);
                push(Metric::PcieLinkWidth, 16);
                if std::mem::take(&mut counters.unlabelled_dbe) > 0 {
                    ledger.counted("ecc_uncorrectable", host, &self.uuid, at);
                }
                if std::mem::take(&mut counters.unlabelled_sbe) > 0 {
                    ledger.counted("ecc_rate", host, &self.uuid, at);
                }
            }
        }
    }

    fn reasons(&self) -> i64 {
        let mut reasons = 0;
        if self.capped {
            reasons |= 0x4;
        }
        if self.slowdown_until != 0 {
            reasons |= 0x8;
        }
        if self.throttled {
            reasons |= 0x20;
        }
        reasons
    }
}
