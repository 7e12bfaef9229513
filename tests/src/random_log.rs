//! Random logs of a small fleet with planted faults, the same for the same seed, in the order of their arrival.
//!
//! A plan of faults is drawn first; readings follow from it at each instant. Data comes after its event time and out of
//! order, each host's records are numbered as they come, and ticks are punctual. No record comes after the allowed
//! lateness, and none twice.

mod plan;

use std::collections::BTreeMap;

use gpufleet_schemas::instant::SECOND;
use gpufleet_schemas::metric::{Metric, Tier};
use gpufleet_schemas::partition::partition_of;
use gpufleet_schemas::record::{
    GpuBatch, GpuBlock, Group, GroupKind, Labels, Origin, PowerKind, Series, Telemetry, Tick, Topology, XidEvent,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use plan::{Fact, Gpu, Host, WATTS};

/// First instant of a log: a multiple of every window and pane.
pub const START: i64 = 1_772_442_000 * SECOND;
/// How far the watermark lags behind the ticks, as `detectors.toml` has it.
pub const DISORDER_BOUND: i64 = 5 * SECOND;
const EVERY: i64 = 5 * SECOND;
/// Seconds of ticks alone at the end.
const TAIL: i64 = 120;
/// Share of its rating that a feed carries when nothing is wrong.
const USUAL_LOAD: f64 = 0.85;

/// How large a log is, and how disorderly.
#[derive(Clone, Debug)]
pub struct Shape {
    pub hosts: usize,
    pub gpus_per_host: usize,
    /// Event time with data; below 40, no incident is sure to be reopened.
    pub minutes: i64,
    pub partitions: i32,
    /// Share of the records that come 6 to 25 s after their event time: behind the watermark, within the lateness.
    pub late_share: f64,
    /// Whether a host's records near a driver reload may be late too, so that old and new epochs come mixed.
    pub late_at_reloads: bool,
}

impl Default for Shape {
    fn default() -> Shape {
        Shape { hosts: 6, gpus_per_host: 2, minutes: 45, partitions: 4, late_share: 0.02, late_at_reloads: true }
    }
}

pub struct RandomLog {
    /// Partition and record, in the order of arrival.
    pub records: Vec<(i32, Telemetry)>,
    /// Watermark at the end, a whole second.
    pub until: i64,
}

/// The log of a seed. Of the default shape it has more than 20 incidents: open, resolved and reopened ones.
pub fn random_log(seed: u64, shape: &Shape) -> RandomLog {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let span = shape.minutes * 60 * SECOND;
    let hosts = plan::hosts(&mut rng, shape.hosts, shape.gpus_per_host, span);
    // Arrival, and at equal arrival ticks before data.
    let mut arrivals: Vec<(i64, bool, i32, Telemetry)> = Vec::new();
    for host in &hosts {
        let partition = partition_of(&host.name, shape.partitions);
        for record in host.records(&mut rng, span) {
            let arrival_at = arrival(&record, host, shape, &mut rng);
            arrivals.push((arrival_at, true, partition, record));
        }
    }
    let last_tick = span / SECOND + TAIL;
    for second in 0..=last_tick {
        let tick_at = START + second * SECOND;
        for partition in 0..shape.partitions {
            arrivals.push((tick_at, false, partition, Telemetry::Tick(Tick { tick_at, writer: "test".into() })));
        }
    }
    arrivals.sort_by_key(|(arrival_at, data, ..)| (*arrival_at, *data));

    let topology = topology(&hosts);
    let mut records: Vec<(i32, Telemetry)> =
        (0..shape.partitions).map(|partition| (partition, Telemetry::Topology(topology.clone()))).collect();
    let mut numbers: BTreeMap<(String, String), i64> = BTreeMap::new();
    for (_, _, partition, mut record) in arrivals {
        if let Some(origin) = origin_of(&mut record) {
            let number = numbers.entry((origin.host.clone(), origin.boot_id.clone())).or_insert(0);
            origin.seq = *number;
            *number += 1;
        }
        records.push((partition, record));
    }
    let until = (START + last_tick * SECOND - DISORDER_BOUND).div_euclid(SECOND) * SECOND;
    RandomLog { records, until }
}

fn origin_of(record: &mut Telemetry) -> Option<&mut Origin> {
    match record {
        Telemetry::Batch(batch) => Some(&mut batch.origin),
        Telemetry::Event(event) => Some(&mut event.origin),
        Telemetry::Tick(_) | Telemetry::Topology(_) => None,
    }
}

/// When the record comes: at most 4 s after its oldest fact, or late.
fn arrival(record: &Telemetry, host: &Host, shape: &Shape, rng: &mut ChaCha8Rng) -> i64 {
    let newest_at = record.newest_at();
    let oldest_at = if let Telemetry::Batch(batch) = record { batch.origin.observed_at } else { newest_at };
    let near_reload = host.reloads.iter().any(|reload| (reload.at - newest_at).abs() < 90 * SECOND);
    let late = rng.random_bool(shape.late_share) && (shape.late_at_reloads || !near_reload);
    let lag = if late {
        rng.random_range(6 * SECOND..25 * SECOND)
    } else {
        rng.random_range(0..4 * SECOND - (newest_at - oldest_at))
    };
    newest_at + lag
}

/// `site/feed`, or `feed` where there is no site.
fn feed_keys(labels: &Labels) -> Vec<String> {
    let key = |feed: &String| match &labels.site {
        Some(site) => format!("{site}/{feed}"),
        None => feed.clone(),
    };
    labels.feeds.iter().map(key).collect()
}

/// Feeds rated for their usual load with some room, and the racks.
fn topology(hosts: &[Host]) -> Topology {
    let mut members: BTreeMap<String, Vec<&Host>> = BTreeMap::new();
    let mut racks: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for host in hosts {
        for key in feed_keys(&host.labels) {
            members.entry(key).or_default().push(host);
        }
        racks.entry(host.labels.rack.clone().unwrap_or_default()).or_default().push(host.name.clone());
    }
    let feeds = members.into_iter().map(|(key, members)| {
        let usual_watts: f64 =
            members.iter().map(|host| (host.gpus.len() as i64 * WATTS) as f64 / host.labels.feeds.len() as f64).sum();
        let hosts = members.iter().map(|host| host.name.clone()).collect();
        let rating_watts = Some((usual_watts / USUAL_LOAD) as i64);
        Group { kind: GroupKind::PowerDomain, key, hosts, rating_watts }
    });
    let racks = racks.into_iter().map(|(key, hosts)| Group { kind: GroupKind::Rack, key, hosts, rating_watts: None });
    Topology { epoch_at: START, writer: "test".into(), groups: feeds.chain(racks).collect() }
}

impl Host {
    /// What the host publishes, in the order of event time within batches and within events.
    fn records(&self, rng: &mut ChaCha8Rng, span: i64) -> Vec<Telemetry> {
        let mut records = Vec::new();
        for number in 0..span / EVERY {
            let at = START + number * EVERY + self.phase;
            let lost = rng.random_bool(0.01);
            if !lost && !self.silent(at) && !self.down(at) {
                records.push(Telemetry::Batch(self.batch(at, number % 2 == 0, rng)));
            }
        }
        for fact in self.facts.iter().filter(|fact| fact.at < START + span && !self.silent(fact.at)) {
            records.push(Telemetry::Event(self.event(fact, rng)));
        }
        records
    }

    fn origin(&self, at: i64) -> Origin {
        let (mut boot, mut reset_epoch) = (1, 0);
        for reload in self.reloads.iter().filter(|reload| reload.at <= at) {
            (boot, reset_epoch) = if reload.reboots { (boot + 1, 0) } else { (boot, reset_epoch + 1) };
        }
        let boot_id = format!("{}-boot-{boot}", self.name);
        Origin { host: self.name.clone(), boot_id, reset_epoch, observed_at: at, ..Origin::default() }
    }

    fn batch(&self, at: i64, health: bool, rng: &mut ChaCha8Rng) -> GpuBatch {
        let mut ticks: Vec<i64> = vec![0];
        // More than one sample in a second, and more than one second in a pane.
        for (from, until) in [(200_000_i64, 900_000_i64), (1_000_000, 2_000_000)] {
            if rng.random_bool(0.15) {
                ticks.push(rng.random_range(from..until) / 1000 * 1000);
            }
        }
        let gpus = self.gpus.iter().enumerate().map(|(i, gpu)| self.block(i, gpu, at, &ticks, health, rng)).collect();
        GpuBatch { origin: self.origin(at), labels: self.labels.clone(), ticks, gpus }
    }

    fn block(&self, i: usize, gpu: &Gpu, at: i64, ticks: &[i64], health: bool, rng: &mut ChaCha8Rng) -> GpuBlock {
        let mut block = GpuBlock {
            gpu_uuid: gpu.uuid.clone(),
            gpu_index: i32::try_from(i).ok(),
            pci: Some(gpu.pci.clone()),
            power_kind: PowerKind::Instant,
            ..GpuBlock::default()
        };
        block.tier_ticks[Tier::Fast as usize] = (0..).take(ticks.len()).collect();
        block.tier_ticks[Tier::Slow as usize] = vec![0];
        block.tier_ticks[Tier::Health as usize] = if health { vec![0] } else { Vec::new() };
        let (mut watts, mut reasons, mut clocks) = (Vec::new(), Vec::new(), Vec::new());
        for tick in ticks {
            let (now, heat) = (at + tick, gpu.heat(at + tick));
            let throttled = heat.filter(|heat| rng.random_bool(heat.chance)).map_or(0, |heat| heat.reasons);
            let power_cap = if rng.random_bool(0.3) { 0x4 } else { 0 };
            let percent = self.boosts.iter().filter(|boost| boost.covers(now)).map(|boost| boost.percent).max();
            watts.push(WATTS * 10 * percent.unwrap_or(100) + rng.random_range(-3000..3000));
            reasons.push(throttled | power_cap);
            clocks.push(if throttled == 0 { 1980 } else { 1200 });
        }
        let mut set = |metric: Metric, values: &[i64]| {
            let values: Vec<Option<i64>> =
                values.iter().map(|value| (!rng.random_bool(0.01)).then_some(*value)).collect();
            block.series[metric.index()] = Series::sparse(&values);
        };
        set(Metric::PowerDraw, &watts);
        set(Metric::ClocksEventReasons, &reasons);
        set(Metric::ClockSm, &clocks);
        set(Metric::TemperatureGpu, &[gpu.heat(at).map_or(gpu.usual_celsius, |heat| heat.celsius)]);
        if health {
            let reloaded_at = self.reloads.iter().map(|reload| reload.at).filter(|reload| *reload <= at).max();
            set(Metric::EccSbeVolatile, &[gpu.corrected.volatile(reloaded_at, at)]);
            if gpu.counts_volatile {
                set(Metric::EccDbeVolatile, &[gpu.uncorrected.volatile(reloaded_at, at)]);
            }
            set(Metric::EccDbeAggregate, &[gpu.uncorrected.aggregate(at)]);
            set(Metric::RowRemapPending, &[i64::from(self.remap_pending(gpu, at))]);
            set(Metric::RowRemapFailed, &[i64::from(gpu.remap_failed_at.is_some_and(|failed| failed <= at))]);
        }
        block
    }

    /// An uncorrected error asked for a remapping, and no reset has done it since.
    fn remap_pending(&self, gpu: &Gpu, at: i64) -> bool {
        let done_since =
            |error_at: i64| self.reloads.iter().any(|reload| reload.heals && error_at < reload.at && reload.at <= at);
        gpu.remaps && gpu.uncorrected.steps.iter().any(|(error_at, _)| *error_at <= at && !done_since(*error_at))
    }

    fn event(&self, fact: &Fact, rng: &mut ChaCha8Rng) -> XidEvent {
        let gpu = &self.gpus[fact.gpu];
        let code = fact.code.map_or(String::new(), |code| code.to_string());
        XidEvent {
            origin: self.origin(fact.at),
            labels: self.labels.clone(),
            kind: fact.kind,
            code: fact.code,
            gpu_uuid: rng.random_bool(0.3).then(|| gpu.uuid.clone()),
            pci: Some(gpu.pci.clone()),
            message: "planted".into(),
            raw: format!("NVRM: {} (PCI:{}): {code}, planted", fact.kind, gpu.pci),
            ..XidEvent::default()
        }
    }

    fn silent(&self, at: i64) -> bool {
        self.silence.as_ref().is_some_and(|silence| silence.contains(&at))
    }

    /// While the driver is loaded anew, nothing is read.
    fn down(&self, at: i64) -> bool {
        self.reloads.iter().any(|reload| (reload.at - reload.outage..reload.at).contains(&at))
    }
}
