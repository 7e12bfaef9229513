//! Feeds the detect tasks from Kafka: each stage a consumer group, each member a thread with one consumer.
//!
//! A member runs the tasks of the partitions that the group gives it (`crate::worker`). Both stages run in every process;
//! more processes in the same group share the partitions.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use gpufleet_runtime::exit::Failure;
use gpufleet_runtime::kafka::{self, Group, GroupArgs, Owner};
use gpufleet_runtime::progress::Progress;
use gpufleet_runtime::topics::INCIDENT_PARTITIONS;
use gpufleet_schemas::Topics;
use gpufleet_schemas::instant::SECOND;
use gpufleet_schemas::record::{Incident, Telemetry, Tick};
use gpufleet_schemas::wire::Encoder;

use super::sink::{Archive, KafkaLog, Outlets};
use super::task::Counts;
use super::{DetectorsConfig, GroupTask, Task};
use crate::engine::book::TaskId;
use crate::engine::{Input, Machine};
use crate::worker::store::Store;
use crate::worker::{self, Shelf, Worker};

/// A member that was given nothing waits so long before it counts as idle.
const UNASSIGNED: Duration = Duration::from_secs(15);
/// Longest that stage 2 reads on after stage 1 has ended.
const READ_ON: Duration = Duration::from_secs(5);

/// Who writes the time of the telemetry topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ClockSource {
    /// Detection: the wall clock, for live hosts.
    Wall,
    /// The log: whoever publishes a recording or a simulation writes ticks of its own time.
    Log,
}

/// What detection reads and by which rules.
#[derive(Clone, Debug)]
pub struct Options {
    pub brokers: String,
    pub topics: Topics,
    /// Partition counts of the telemetry and the partials topic.
    pub partitions: i32,
    pub partials: i32,
    /// Identity of the log; the cluster's id when none is given.
    pub log_id: Option<String>,
    pub config: DetectorsConfig,
    pub group: GroupArgs,
    pub clock: ClockSource,
    /// Members of stage 1 in this process.
    pub threads: u32,
    /// Folder of the snapshots; none keeps them in memory, for a log that ends with the process.
    pub snapshots: Option<PathBuf>,
    pub snapshot_every: Duration,
    /// How long to wait for a broker at start.
    pub patience: Duration,
    /// Stop after so long without a record; none runs for ever.
    pub stop_when_idle: Option<Duration>,
}

/// What a run of detection did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Stage 1 and stage 2.
    pub counts: Counts,
    pub group_counts: Counts,
    pub work: worker::Report,
}

/// Checks the topics; gives the log's id and where outputs go.
fn check_topics(options: &Options) -> Result<(String, Outlets), Failure> {
    let (brokers, topics) = (&options.brokers, &options.topics);
    let names = [topics.telemetry.as_str(), &topics.partials, &topics.incidents];
    let (cluster, layout) = kafka::connect(brokers, &names, options.patience)?;
    kafka::require(&layout, &topics.telemetry, options.partitions, brokers)?;
    kafka::require(&layout, &topics.partials, options.partials, brokers)?;
    kafka::require(&layout, &topics.incidents, INCIDENT_PARTITIONS, brokers)?;
    let log_id = options.log_id.clone().unwrap_or_else(|| kafka::log_id(&cluster, &topics.telemetry));
    let outlets = Outlets {
        brokers: brokers.clone(),
        topics: topics.clone(),
        incidents: INCIDENT_PARTITIONS,
        partials: options.partials,
    };
    Ok((log_id, outlets))
}

/// What all members of a process share.
#[derive(Clone)]
struct Common {
    options: Arc<Options>,
    outlets: Outlets,
    archive: Arc<Mutex<Archive>>,
    store: Store,
    observe: Arc<Mutex<dyn FnMut(&Incident) + Send>>,
    start: Instant,
    /// Milliseconds after `start` of the last sign of life.
    active_at: Arc<AtomicU64>,
    /// A member has failed: the others end too.
    failed: Arc<AtomicBool>,
}

impl Common {
    fn touch(&self) {
        self.active_at.store(u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Nothing has come for so long, since the group had given this member something to be idle with.
    fn is_over(&self, idle: Duration, owned: &[i32]) -> bool {
        let idle = if owned.is_empty() { idle.max(UNASSIGNED) } else { idle };
        self.active_at.load(Ordering::Relaxed) > 0 && self.idle_for() >= idle
    }

    fn idle_for(&self) -> Duration {
        self.start.elapsed().saturating_sub(Duration::from_millis(self.active_at.load(Ordering::Relaxed)))
    }
}

/// Runs until it is asked to stop, the broker fails for good, or the log has been idle for long enough.
pub fn run(
    options: &Options,
    progress: &Progress,
    observe: impl FnMut(&Incident) + Send + 'static,
) -> Result<Report, Failure> {
    let (log_id, outlets) = check_topics(options)?;
    let store = match &options.snapshots {
        Some(folder) => Store::folder(folder)?,
        None => Store::memory()?,
    };
    let common = Common {
        options: Arc::new(options.clone()),
        outlets,
        archive: Arc::default(),
        store,
        observe: Arc::new(Mutex::new(observe)),
        start: Instant::now(),
        active_at: Arc::default(),
        failed: Arc::default(),
    };
    let (topics, config) = (&options.topics, &options.config);
    let id = move |topic: &str, partition: i32| TaskId { log_id: log_id.clone(), topic: topic.to_owned(), partition };
    let groups_progress = Progress::new(options.partials);
    let upstream: Vec<String> = (0..options.partitions).map(|p| id(&topics.telemetry, p).to_string()).collect();
    let groups = {
        let (topic, config, id) = (topics.partials.clone(), config.clone(), id.clone());
        let make = move |partition| GroupTask::new(id(&topic, partition), upstream.iter().cloned(), &config);
        let input = InputTopic { name: topics.partials.clone(), partitions: options.partials, ticks: false };
        common.start_member(input, "groups", make, groups_progress.clone())?
    };
    let mut hosts = Vec::new();
    for member in 0..options.threads.max(1) {
        let (topic, config, id) = (topics.telemetry.clone(), config.clone(), id.clone());
        let make = move |partition| Task::new(id(&topic, partition), &config);
        let ticks = options.clock == ClockSource::Wall;
        let input = InputTopic { name: topics.telemetry.clone(), partitions: options.partitions, ticks };
        hosts.push(common.start_member(input, &format!("hosts-{member}"), make, progress.clone())?);
    }
    let mut report = Report::default();
    let mut result = Ok(());
    for member in hosts {
        match join(member) {
            Ok((work, counts)) => {
                report.work += work;
                counts.into_iter().for_each(|counts: Counts| report.counts += counts);
            }
            Err(failure) => result = result.and(Err(failure)),
        }
    }
    // Stage 2 reads what stage 1 has sent last.
    let ends = kafka::offsets(&options.brokers, &topics.partials, options.partials).unwrap_or_default();
    let ended = Instant::now();
    let behind = |progress: &Progress| {
        progress.next().iter().zip(&ends).any(|(next, (low, high))| *next != -1 && low < high && next < high)
    };
    while behind(&groups_progress) && !groups.is_finished() && ended.elapsed() < READ_ON {
        std::thread::sleep(Duration::from_millis(10));
    }
    groups_progress.stop();
    let (work, counts) = join(groups)?;
    report.work += work;
    counts.into_iter().for_each(|counts: Counts| report.group_counts += counts);
    result.map(|()| report)
}

type Running = JoinHandle<Result<(worker::Report, Vec<Counts>), Failure>>;

fn join(member: Running) -> Result<(worker::Report, Vec<Counts>), Failure> {
    let name = member.thread().name().unwrap_or("a member").to_owned();
    member.join().map_err(|_| Failure::bug(format!("{name} panicked; please report this with the message above")))?
}

/// The topic that a stage reads.
struct InputTopic {
    name: String,
    partitions: i32,
    /// Its readers write its time.
    ticks: bool,
}

/// A worker as the owner of what the group gives it.
struct Member<M> {
    worker: Worker<M, KafkaLog>,
    topic: String,
    partitions: i32,
    progress: Progress,
    common: Common,
}

impl<M: Machine + Send> Owner for Member<M> {
    fn assigned(&mut self, partition: i32) -> Result<i64, Failure> {
        if partition >= self.partitions {
            return Err(Failure::config(format!(
                "the topic {} has grown to more than {} partitions, so hosts and groups would move between them; stop \
                 every role, and go on with a new topic of the count that you want",
                self.topic, self.partitions
            )));
        }
        let offset = self.worker.assigned(partition, self.common.start.elapsed())?;
        self.common.touch();
        self.progress.consumed(partition, offset - 1, 0);
        Ok(offset)
    }

    fn revoked(&mut self, partition: i32) -> Result<(), Failure> {
        self.worker.revoked(partition)
    }

    fn lost(&mut self, partition: i32) {
        self.worker.lost(partition);
    }

    fn commits(&mut self) -> Vec<(i32, i64)> {
        std::mem::take(&mut self.worker.log.commits)
    }
}

/// What a machine has counted.
trait Counting {
    fn counted(&self) -> Counts;
}

impl Counting for Task {
    fn counted(&self) -> Counts {
        self.counts()
    }
}

impl Counting for GroupTask {
    fn counted(&self) -> Counts {
        self.counts()
    }
}

impl Common {
    fn start_member<M: Machine + Counting + Send + 'static>(
        &self,
        input: InputTopic,
        member: &str,
        make: impl Fn(i32) -> M + Send + 'static,
        progress: Progress,
    ) -> Result<Running, Failure> {
        let (common, name) = (self.clone(), member.to_owned());
        let run = move || {
            let result = common.run_member(input, &name, make, progress.clone());
            if result.is_err() {
                common.failed.store(true, Ordering::SeqCst);
            }
            result
        };
        std::thread::Builder::new()
            .name(format!("detect-{member}"))
            .spawn(run)
            .map_err(|error| Failure::external(format!("cannot start {member}: {error}")))
    }

    fn run_member<M: Machine + Counting + Send + 'static>(
        &self,
        input: InputTopic,
        member: &str,
        make: impl Fn(i32) -> M + Send + 'static,
        progress: Progress,
    ) -> Result<(worker::Report, Vec<Counts>), Failure> {
        let options = &self.options;
        let log = KafkaLog::open(self.outlets.clone(), &input.name, self.archive.clone())?;
        let worker_options =
            worker::Options { version: options.config.version(), snapshot_every: options.snapshot_every };
        let observe = self.observe.clone();
        let observe = move |incident: &Incident| {
            if let Ok(mut observe) = observe.lock() {
                observe(incident);
            }
        };
        let worker = Worker::new(worker_options, log, Shelf::beside(self.store.clone())?, make, observe);
        let owner = Member {
            worker,
            topic: input.name.clone(),
            partitions: input.partitions,
            progress: progress.clone(),
            common: self.clone(),
        };
        let group = Group::join(&options.brokers, &input.name, &options.group, member, owner)?;
        let mut ticker = input.ticks.then(|| Ticker::new(member));
        let mut kept_at = Instant::now();
        while !progress.stopping() && !self.failed.load(Ordering::Relaxed) {
            let message = group.next(Duration::from_millis(20))?;
            let mut owner = group.owner();
            if let Some(ticker) = &mut ticker {
                ticker.tick(&owner.worker)?;
            }
            match message {
                Some(message) => {
                    self.touch();
                    let input =
                        Input { offset: message.offset, appended_at: message.appended_at(), payload: &message.payload };
                    owner.worker.record(message.partition, input)?;
                    progress.consumed(message.partition, message.offset, message.payload.len());
                }
                // An idle member waits until the group has given it something to be idle with.
                None if options.stop_when_idle.is_some_and(|idle| self.is_over(idle, &owner.worker.owned())) => break,
                None => {}
            }
            if kept_at.elapsed() >= Duration::from_millis(20) {
                kept_at = Instant::now();
                owner.worker.keep(self.start.elapsed())?;
                let told = !owner.worker.log.commits.is_empty();
                drop(owner);
                if told {
                    group.commit();
                }
            }
        }
        let mut owner = group.owner();
        let counts = owner.worker.machines().map(Counting::counted).collect();
        owner.worker.finish()?;
        let report = owner.worker.report;
        drop(owner);
        group.commit();
        Ok((report, counts))
    }
}

/// Writes the wall clock into the partitions that are owned, once a second.
struct Ticker {
    encoder: Encoder,
    writer: String,
    newest: i64,
    buffer: Vec<u8>,
}

impl Ticker {
    fn new(member: &str) -> Ticker {
        Ticker { encoder: Encoder::default(), writer: format!("detect {member}"), newest: 0, buffer: Vec::new() }
    }

    fn tick<M: Machine>(&mut self, worker: &Worker<M, KafkaLog>) -> Result<(), Failure> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let second = i64::try_from(now.as_secs()).unwrap_or(i64::MAX / SECOND);
        if second <= self.newest {
            return Ok(());
        }
        self.newest = second;
        let tick = Telemetry::Tick(Tick { tick_at: second * SECOND, writer: self.writer.clone() });
        self.encoder.telemetry(&tick, &mut self.buffer);
        worker.owned().into_iter().try_for_each(|partition| worker.log.tick(partition, &self.buffer))
    }
}
