//! One source, all the way: publisher, broker, detection, archive, lake.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gpufleet_collector::publisher::{Acknowledged, Pace, Publisher};
use gpufleet_collector::source::Source;
use gpufleet_processor::detect::consumer::ClockSource;
use gpufleet_processor::{archive, detect};
use gpufleet_runtime::exit::Failure;
use gpufleet_runtime::kafka::GroupArgs;
use gpufleet_runtime::progress::Progress;
use gpufleet_runtime::{kafka, topics};
use gpufleet_schemas::Topics;
use gpufleet_schemas::record::{Incident, Telemetry};

use crate::broker::EmbeddedBroker;

/// Incidents that may wait to be shown. Showing is a courtesy: beyond this they are only in the lake.
const SHOWN_AT_MOST: usize = 4096;
/// Partitions of the partials topic: a pipeline in one process has one reader of it.
const PARTIALS: i32 = 2;
/// Longest that the end of a run may take.
const DRAIN: Duration = Duration::from_secs(600);

/// How to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// A real cluster; none starts the embedded broker.
    pub brokers: Option<String>,
    /// Goes before the topics' names on a real cluster.
    pub topic_prefix: String,
    pub partitions: i32,
    pub replication: i32,
    pub lake: PathBuf,
    pub detectors: detect::DetectorsConfig,
    /// Identity of this run's log on the embedded broker.
    pub run: String,
    pub flush_rows: usize,
    pub flush_every: Duration,
    pub patience: Duration,
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub log_id: String,
    pub samples_acked: u64,
    pub events_acked: u64,
    pub detect: detect::consumer::Report,
    pub archive: archive::consumer::Report,
}

/// What the host of a pipeline sees while it runs.
pub trait Watcher {
    /// A record is about to be published.
    fn record(&mut self, record: &Telemetry);
    /// An incident was opened or revised.
    fn incident(&mut self, incident: &Incident);
    /// The source has ended; the rest is on its way to the lake.
    fn draining(&mut self) {}
}

/// Sees nothing.
impl Watcher for () {
    fn record(&mut self, _: &Telemetry) {}
    fn incident(&mut self, _: &Incident) {}
}

/// Runs `source` to its end and everything that came of it into the lake.
pub fn run(
    source: &mut dyn Source,
    pace: &Pace,
    options: &Options,
    watcher: &mut dyn Watcher,
) -> Result<Outcome, Failure> {
    let topics = Topics::with_prefix(&options.topic_prefix);
    let (broker, brokers, log_id) = match &options.brokers {
        Some(brokers) => {
            let log_id = prepare(brokers, &topics, options)?;
            (None, brokers.clone(), log_id)
        }
        None => {
            let broker = EmbeddedBroker::start(&topics, options.partitions, PARTIALS)?;
            let brokers = broker.bootstrap();
            (Some(broker), brokers, options.run.clone())
        }
    };
    let roles = Roles::start(&brokers, &topics, &log_id, options)?;
    let mut publisher = Publisher::open(&brokers, &topics.telemetry, options.partitions, Some("source"))?;
    if broker.is_some() {
        publisher = publisher.heed(vec![roles.detected.clone(), roles.archived.clone()]);
    }
    let acknowledged = publisher.acknowledged();
    let published = publisher.run(source, pace, &mut |record| {
        roles.incidents.try_iter().for_each(|incident| watcher.incident(&incident));
        watcher.record(record);
        roles.alive()
    });
    if roles.alive() {
        published?;
    }
    // Before the broker goes, or it would miss it.
    drop(publisher);
    watcher.draining();
    let outcome = roles.drain(&brokers, &topics, options, &acknowledged, watcher, &log_id);
    drop(broker);
    outcome
}

/// Makes the topics of a real cluster, and names the log.
fn prepare(brokers: &str, topics: &Topics, options: &Options) -> Result<String, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::external(format!("cannot start: {error}")))?;
    let specs = topics::specs(topics, options.partitions, PARTIALS, options.replication);
    let outcome = runtime.block_on(topics::apply(brokers, &specs, options.patience))?;
    if let Some(difference) = outcome.differs.first() {
        return Err(Failure::config(format!("a topic at {brokers} is not as it must be: {difference}")));
    }
    let (cluster, _) = kafka::connect(brokers, &[], options.patience)?;
    Ok(kafka::log_id(&cluster, &topics.telemetry))
}

type Role<T> = JoinHandle<Result<T, Failure>>;

struct Roles {
    detect: Role<detect::consumer::Report>,
    archive: Role<archive::consumer::Report>,
    detected: Progress,
    archived: Progress,
    archived_incidents: Progress,
    incidents: Receiver<Incident>,
}

impl Roles {
    fn start(brokers: &str, topics: &Topics, log_id: &str, options: &Options) -> Result<Roles, Failure> {
        let detected = Progress::new(options.partitions);
        let archived = Progress::new(options.partitions);
        let archived_incidents = Progress::new(topics::INCIDENT_PARTITIONS);
        let (show, incidents) = sync_channel(SHOWN_AT_MOST);
        let detect_options = detect::consumer::Options {
            brokers: brokers.to_owned(),
            topics: topics.clone(),
            partitions: options.partitions,
            partials: PARTIALS,
            log_id: Some(log_id.to_owned()),
            config: options.detectors.clone(),
            group: GroupArgs {
                group: format!("gpufleet-{}", options.run),
                instance: None,
                session_timeout: Duration::from_secs(45),
            },
            // The source writes the ticks of its own time.
            clock: ClockSource::Log,
            threads: 1,
            // The log of a run ends with it.
            snapshots: None,
            snapshot_every: Duration::from_secs(30),
            patience: options.patience,
            stop_when_idle: None,
        };
        let archive_options = archive::consumer::Options {
            brokers: brokers.to_owned(),
            topics: topics.clone(),
            partitions: options.partitions,
            log_id: Some(log_id.to_owned()),
            lake: options.lake.clone(),
            flush_rows: options.flush_rows,
            flush_every: options.flush_every,
            patience: options.patience,
            stop_when_idle: None,
        };
        let progress = detected.clone();
        let detect = role("detect", move || {
            let result = detect::consumer::run(&detect_options, &progress, move |incident| {
                drop(show.try_send(incident.clone()))
            });
            progress.stop();
            result
        })?;
        let (telemetry, found) = (archived.clone(), archived_incidents.clone());
        let archive = role("archive", move || {
            let result = archive::consumer::run(&archive_options, &telemetry, &found);
            telemetry.stop();
            result
        })?;
        Ok(Roles { detect, archive, detected, archived, archived_incidents, incidents })
    }

    /// Neither role has ended by itself.
    fn alive(&self) -> bool {
        !self.detect.is_finished() && !self.archive.is_finished()
    }

    /// Waits until everything published is detected on and archived, and everything detected is archived.
    fn drain(
        self,
        brokers: &str,
        topics: &Topics,
        options: &Options,
        acknowledged: &Acknowledged,
        watcher: &mut dyn Watcher,
        log_id: &str,
    ) -> Result<Outcome, Failure> {
        self.wait(&self.detected, &kafka::offsets(brokers, &topics.telemetry, options.partitions)?, watcher)?;
        self.detected.stop();
        let Roles { detect, archive, archived, archived_incidents, incidents, .. } = self;
        let detect = join(detect)?;
        incidents.try_iter().for_each(|incident| watcher.incident(&incident));
        let ends = kafka::offsets(brokers, &topics.telemetry, options.partitions)?;
        let found = kafka::offsets(brokers, &topics.incidents, topics::INCIDENT_PARTITIONS)?;
        let start = Instant::now();
        while !archive.is_finished() && !(reached(&archived, &ends) && reached(&archived_incidents, &found)) {
            in_time(start)?;
            std::thread::sleep(Duration::from_millis(20));
        }
        archived.stop();
        Ok(Outcome {
            log_id: log_id.to_owned(),
            samples_acked: acknowledged.samples(),
            events_acked: acknowledged.events(),
            detect,
            archive: join(archive)?,
        })
    }

    fn wait(&self, progress: &Progress, ends: &[(i64, i64)], watcher: &mut dyn Watcher) -> Result<(), Failure> {
        let start = Instant::now();
        while self.alive() && !reached(progress, ends) {
            self.incidents.try_iter().for_each(|incident| watcher.incident(&incident));
            in_time(start)?;
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

fn role<T: Send + 'static>(
    name: &str,
    run: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<Role<T>, Failure> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(run)
        .map_err(|error| Failure::external(format!("cannot start {name}: {error}")))
}

fn join<T>(role: Role<T>) -> Result<T, Failure> {
    let name = role.thread().name().unwrap_or("role").to_owned();
    role.join().map_err(|_| Failure::bug(format!("{name} panicked; please report this with the message above")))?
}

/// A partition that was never written has nothing to reach.
fn reached(progress: &Progress, ends: &[(i64, i64)]) -> bool {
    progress.next().iter().zip(ends).all(|(next, (low, high))| low == high || next >= high)
}

fn in_time(start: Instant) -> Result<(), Failure> {
    if start.elapsed() < DRAIN {
        return Ok(());
    }
    Err(Failure::external(format!("the pipeline did not come to its end within {} s", DRAIN.as_secs())))
}
