//! A simulated fleet: hosts with eight GPUs in one synchronous job, with planted faults and look-alikes.
//!
//! Gives the records that real collectors would publish, in time order, on a virtual clock: the same seed gives the
//! same records. What was planted stands in a [`Ledger`], which the pipeline never sees. Labels come from the state that
//! the simulated GPU reached (a GPU that throttled), not from the intention (airflow that was blocked).

mod fault;
mod gpu;
mod ledger;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use gpufleet_schemas::instant::SECOND;
use gpufleet_schemas::metric::{METRIC_COUNT, Metric, Tier};
use gpufleet_schemas::record::{
    GpuBatch, GpuBlock, Group, GroupKind, Labels, Origin, PowerKind, Series, Telemetry, Topology,
};

pub use fault::{Fault, Plan};
pub use ledger::{Decoy, Label, Ledger};

use crate::kernel_log;
use crate::source::kernel_log_file::kernel_event_to_record;
use crate::source::{Source, SourceError};
use gpu::Gpu;

/// GPUs of a host.
pub const GPUS_PER_HOST: usize = 8;
/// Where the fleet stands.
const SITE: &str = "demo";
/// What the feeds are rated for per GPU: its limit, and a tenth for the spikes that its sensor shows.
const WATTS_PER_GPU: i64 = 770;
const SLOW_PERIOD: i64 = SECOND;
const HEALTH_PERIOD: i64 = 10 * SECOND;
/// How long the simulated kernels have been up at the start: their stamps count from there.
const UPTIME: i64 = 3600 * SECOND;

/// What to simulate.
#[derive(Clone, Debug)]
pub struct FleetOptions {
    pub seed: u64,
    pub gpus: usize,
    /// First instant.
    pub start_at: i64,
    /// Microseconds of fleet time.
    pub span: i64,
    /// Fast ticks a second.
    pub fast_hertz: i64,
    /// Distinguishes runs of the same seed, as a boot would.
    pub run: String,
}

struct Host {
    name: String,
    labels: Labels,
    gpus: Vec<Gpu>,
    seq: i64,
    reset_epoch: i32,
    kmsg_sequence: u64,
}

/// The fleet, as a source of records.
pub struct Simulator {
    options: FleetOptions,
    hosts: Vec<Host>,
    plan: Plan,
    now: i64,
    ready: VecDeque<Telemetry>,
    ledger: Arc<Mutex<Ledger>>,
}

impl Simulator {
    pub fn new(options: FleetOptions) -> Simulator {
        let hosts = options.gpus.div_ceil(GPUS_PER_HOST).max(1);
        let fleet: Vec<Host> = (0..hosts)
            .map(|host| {
                let count = GPUS_PER_HOST.min(options.gpus - host * GPUS_PER_HOST);
                Host {
                    name: format!("node-{host:03}"),
                    labels: Labels {
                        site: Some(SITE.to_owned()),
                        row: Some(format!("row-{}", host / 16)),
                        rack: Some(format!("rack-{:02}", host / 4)),
                        feeds: vec!["A".to_owned(), "B".to_owned()],
                        driver_version: Some("570.86.15".to_owned()),
                    },
                    gpus: (0..count).map(|index| Gpu::new(options.seed, host, index)).collect(),
                    seq: 0,
                    reset_epoch: 0,
                    kmsg_sequence: 1000,
                }
            })
            .collect();
        let plan = Plan::draw(options.seed, options.gpus, options.span);
        let ledger = Ledger { labels: Vec::new(), decoys: plan.decoys(&|gpu| name_of(&fleet, gpu)) };
        let topology = topology(&fleet, options.start_at);
        Simulator {
            now: options.start_at,
            hosts: fleet,
            plan,
            ready: VecDeque::from([Telemetry::Topology(topology)]),
            ledger: Arc::new(Mutex::new(ledger)),
            options,
        }
    }

    /// The ledger; complete when the source has ended.
    pub fn ledger(&self) -> Arc<Mutex<Ledger>> {
        self.ledger.clone()
    }

    fn end_at(&self) -> i64 {
        self.options.start_at + self.options.span
    }

    /// Time between two flushes of a host: half a second, or a tick where ticks are rarer.
    fn flush_period(&self) -> i64 {
        (SECOND / 2).max(SECOND / self.options.fast_hertz.max(1))
    }

    /// Simulates every host up to its next flush.
    fn advance(&mut self) -> Result<(), SourceError> {
        let (from, until) = (self.now, self.now + self.flush_period());
        self.start_faults(from, until)?;
        let tick = SECOND / self.options.fast_hertz.max(1);
        let mut ledger = self.ledger.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        for host in &mut self.hosts {
            let batch = host.flush(&self.options, from, until, tick, &mut ledger);
            self.ready.push_back(Telemetry::Batch(batch));
        }
        self.now = until;
        Ok(())
    }

    /// Carries out what the plan has for `[from, until)`.
    fn start_faults(&mut self, from: i64, until: i64) -> Result<(), SourceError> {
        let (start_at, run) = (self.options.start_at, self.options.run.clone());
        let boot_at = start_at - UPTIME;
        let due: Vec<_> = self.plan.due(from - start_at, until - start_at).collect();
        for (at, gpu, fault) in due {
            let at = start_at + at;
            let Some(host) = self.hosts.get_mut(gpu / GPUS_PER_HOST) else { continue };
            let lines = host.apply(gpu % GPUS_PER_HOST, at, boot_at, &fault, &self.ledger);
            for line in lines {
                let clock = kernel_log::Clock { boot_at_micros: Some(boot_at), ..kernel_log::Clock::default() };
                let mut decoded = Vec::new();
                kernel_log::read(line.as_bytes(), &clock, |event| decoded.push(event))
                    .map_err(|source| SourceError::unreadable("the simulated kernel log", &source))?;
                for event in decoded {
                    let origin = host.origin(&self.options, &run, event.at_micros);
                    self.ready.push_back(Telemetry::Event(kernel_event_to_record(event, origin, host.labels.clone())));
                }
            }
        }
        Ok(())
    }
}

/// Two feeds that every host hangs on half by half, rated for every GPU at its limit.
fn topology(hosts: &[Host], epoch_at: i64) -> Topology {
    let names: Vec<String> = hosts.iter().map(|host| host.name.clone()).collect();
    let gpus: usize = hosts.iter().map(|host| host.gpus.len()).sum();
    let rating_watts = i64::try_from(gpus).unwrap_or(i64::MAX).saturating_mul(WATTS_PER_GPU) / 2;
    let feed = |feed: &str| Group {
        kind: GroupKind::PowerDomain,
        key: format!("{SITE}/{feed}"),
        hosts: names.clone(),
        rating_watts: Some(rating_watts),
    };
    Topology { epoch_at, writer: "simulator".to_owned(), groups: vec![feed("A"), feed("B")] }
}

fn name_of(hosts: &[Host], gpu: usize) -> (String, String) {
    let host = &hosts[gpu / GPUS_PER_HOST];
    (host.name.clone(), host.gpus[gpu % GPUS_PER_HOST].uuid.clone())
}

impl Source for Simulator {
    fn next(&mut self) -> Result<Option<Telemetry>, SourceError> {
        while self.ready.is_empty() && self.now < self.end_at() {
            self.advance()?;
        }
        Ok(self.ready.pop_front())
    }
}

impl Host {
    fn origin(&mut self, options: &FleetOptions, run: &str, observed_at: i64) -> Origin {
        let seq = self.seq;
        self.seq += 1;
        Origin {
            host: self.name.clone(),
            boot_id: format!("sim-{}-{run}", options.seed),
            seq,
            reset_epoch: self.reset_epoch,
            collector_version: env!("CARGO_PKG_VERSION").to_owned(),
            observed_at,
            lost: Vec::new(),
        }
    }

    /// Lets a fault begin; gives the kernel-log lines that it prints.
    fn apply(&mut self, index: usize, at: i64, boot_at: i64, fault: &Fault, ledger: &Mutex<Ledger>) -> Vec<String> {
        if matches!(fault, Fault::DriverReload) {
            self.reset_epoch += 1;
            self.gpus.iter_mut().for_each(Gpu::reload_driver);
            return Vec::new();
        }
        let Some(gpu) = self.gpus.get_mut(index) else { return Vec::new() };
        gpu.apply(fault);
        let lines = fault.kernel_lines(&gpu.pci);
        if let Some(kind) = fault.labels_event() {
            let mut ledger = ledger.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            ledger.event(kind, &self.name, &gpu.uuid, at, fault);
        }
        lines
            .into_iter()
            .map(|(priority, text)| {
                self.kmsg_sequence += 1;
                format!("{priority},{},{},-;{text}\n", self.kmsg_sequence, at - boot_at)
            })
            .collect()
    }

    fn flush(&mut self, options: &FleetOptions, from: i64, until: i64, tick: i64, ledger: &mut Ledger) -> GpuBatch {
        let ticks: Vec<i64> = (0..).map(|i| from + i * tick).take_while(|at| *at < until).collect();
        let every = |period: i64| {
            let due = ticks.iter().enumerate().filter(move |(_, at)| (**at - options.start_at) % period == 0);
            due.filter_map(|(i, _)| i32::try_from(i).ok()).collect::<Vec<i32>>()
        };
        let fast: Vec<i32> = (0..i32::try_from(ticks.len()).unwrap_or(i32::MAX)).collect();
        let positions = [fast, every(SLOW_PERIOD), every(HEALTH_PERIOD)];
        let mut gpus = Vec::with_capacity(self.gpus.len());
        for (index, gpu) in self.gpus.iter_mut().enumerate() {
            if gpu.lost {
                continue;
            }
            let mut values: [Vec<i64>; METRIC_COUNT] = std::array::from_fn(|_| Vec::new());
            for (i, at) in ticks.iter().enumerate() {
                gpu.step(*at - options.start_at, tick);
                if gpu.throttled() {
                    ledger.throttled(&self.name, &gpu.uuid, *at);
                }
                let i = i32::try_from(i).unwrap_or(i32::MAX);
                for tier in Tier::ALL {
                    if positions[tier as usize].binary_search(&i).is_ok() {
                        gpu.read(tier, *at, &mut values, ledger, &self.name);
                    }
                }
            }
            let mut block = GpuBlock {
                gpu_uuid: gpu.uuid.clone(),
                gpu_index: i32::try_from(index).ok(),
                pci: Some(gpu.pci.clone()),
                model: Some("NVIDIA H100 80GB HBM3".to_owned()),
                job_id: Some("pretrain-7".to_owned()),
                step: None,
                power_kind: PowerKind::Instant,
                tier_ticks: positions.clone(),
                ..GpuBlock::default()
            };
            for (metric, values) in Metric::ALL.iter().zip(values) {
                block.series[metric.index()] = Series::dense(values);
            }
            gpus.push(block);
        }
        let base = ticks.first().copied().unwrap_or(from);
        GpuBatch {
            origin: self.origin(options, &options.run.clone(), base),
            labels: self.labels.clone(),
            ticks: ticks.iter().map(|at| at - base).collect(),
            gpus,
        }
    }
}
