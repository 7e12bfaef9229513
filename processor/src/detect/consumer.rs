//! Feeds the detect tasks from Kafka: one task per partition, all partitions in this process.
//!
//! There are no snapshots yet: a start replays each partition from offset 0 and keeps silent about what is out.

use std::time::{Duration, Instant};

use gpufleet_runtime::exit::Failure;
use gpufleet_runtime::kafka::{self, Reader, Start};
use gpufleet_runtime::progress::Progress;
use gpufleet_schemas::Topics;
use gpufleet_schemas::record::Incident;

use super::sink::Sink;
use super::task::Counts;
use super::{DetectorsConfig, Task};
use crate::engine::book::TaskId;

/// What detection reads and by which rules.
#[derive(Clone, Debug)]
pub struct Options {
    pub brokers: String,
    pub topics: Topics,
    /// Partition count of the telemetry topic.
    pub partitions: i32,
    /// Identity of the log; the cluster's id when none is given.
    pub log_id: Option<String>,
    pub config: DetectorsConfig,
    /// How long to wait for a broker at start.
    pub patience: Duration,
    /// Stop after so long without a record; none runs for ever.
    pub stop_when_idle: Option<Duration>,
}

/// What a run of detection did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub counts: Counts,
    pub incidents_sent: u64,
    pub incidents_suppressed: u64,
}

/// Checks the topics and gives the log's id and the partition count of `incidents`.
pub fn check_topics(
    brokers: &str,
    topics: &Topics,
    partitions: i32,
    log_id: Option<&str>,
    patience: Duration,
) -> Result<(String, i32), Failure> {
    let (cluster, layout) = kafka::connect(brokers, &[&topics.telemetry, &topics.incidents], patience)?;
    kafka::require(&layout, &topics.telemetry, partitions, brokers)?;
    let incidents = layout.iter().find(|found| found.name == topics.incidents);
    let incident_partitions = incidents.map_or(gpufleet_runtime::topics::INCIDENT_PARTITIONS, |found| found.partitions);
    kafka::require(&layout, &topics.incidents, incident_partitions, brokers)?;
    Ok((log_id.map_or_else(|| kafka::log_id(&cluster, &topics.telemetry), str::to_owned), incident_partitions))
}

/// Runs until it is asked to stop, the broker fails for good, or the log has been idle for long enough.
pub fn run(options: &Options, progress: &Progress, mut observe: impl FnMut(&Incident)) -> Result<Report, Failure> {
    let (log_id, incident_partitions) = check_topics(
        &options.brokers,
        &options.topics,
        options.partitions,
        options.log_id.as_deref(),
        options.patience,
    )?;
    let mut sink = Sink::open(&options.brokers, &options.topics.incidents, incident_partitions)?;
    let mut tasks: Vec<Task> = (0..options.partitions)
        .map(|partition| {
            let id = TaskId { log_id: log_id.clone(), topic: options.topics.telemetry.clone(), partition };
            Task::new(id, &options.config)
        })
        .collect();
    let starts: Vec<Start> = (0..options.partitions)
        .map(|partition| Start { topic: options.topics.telemetry.clone(), partition, offset: 0 })
        .collect();
    let reader = Reader::open(&options.brokers, &starts)?;
    let mut expected = vec![0i64; tasks.len()];
    let (mut incidents, mut quiet_since) = (Vec::new(), Instant::now());
    while !progress.stopping() {
        let Some(message) = reader.next(Duration::from_millis(50))? else {
            if options.stop_when_idle.is_some_and(|idle| quiet_since.elapsed() >= idle) {
                break;
            }
            continue;
        };
        quiet_since = Instant::now();
        let partition = usize::try_from(message.partition).unwrap_or(usize::MAX);
        let (Some(task), Some(next)) = (tasks.get_mut(partition), expected.get_mut(partition)) else { continue };
        if message.offset < *next {
            continue;
        }
        if message.offset > *next && *next == 0 {
            return Err(overtaken(&message, 0));
        }
        *next = message.offset + 1;
        task.step(message.offset, &message.payload, &mut incidents);
        for incident in incidents.drain(..) {
            sink.emit(&incident)?;
            observe(&incident);
        }
        progress.consumed(message.partition, message.offset, message.payload.len());
    }
    sink.flush()?;
    let counts = tasks.iter().map(Task::counts).fold(Counts::default(), |sum, counts| Counts {
        records: sum.records + counts.records,
        undecodable: sum.undecodable + counts.undecodable,
        duplicates: sum.duplicates + counts.duplicates,
        from_the_future: sum.from_the_future + counts.from_the_future,
        too_late: sum.too_late + counts.too_late,
    });
    Ok(Report { counts, incidents_sent: sink.sent, incidents_suppressed: sink.suppressed })
}

fn overtaken(message: &kafka::Message, wanted: i64) -> Failure {
    Failure::external(format!(
        "{} partition {} starts at offset {} but {wanted} is needed: the start of the log overtook detection",
        message.topic, message.partition, message.offset
    ))
}
