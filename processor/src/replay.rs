//! Replay: what would these rules have said?
//!
//! Runs both stages of detection over what a log or a lake holds, in this process and with no side effect, and compares
//! the incidents with those that were emitted then. The same rules give the same incidents; other thresholds show what
//! they would have changed.

pub mod difference;
pub mod lake;
pub mod topic;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use gpufleet_runtime::exit::Failure;
use gpufleet_runtime::kafka;
use gpufleet_runtime::lake::Lake;
use gpufleet_runtime::topics::INCIDENT_PARTITIONS;
use gpufleet_schemas::Topics;
use gpufleet_schemas::instant::SECOND;
use gpufleet_schemas::record::{Incident, Telemetry, Upstream};

use crate::detect::task::WANTED;
use crate::detect::{DetectorsConfig, GroupTask, Task};
use crate::engine::book::TaskId;
use crate::engine::{Input, Machine, Output};

/// How long a broker may take to answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// What arrives so long after a range may still belong to it.
const AFTER: i64 = 60 * SECOND;

/// The revisions that were emitted then, those of the replay, and the event time at which the log begins.
pub type Told = (Vec<Incident>, Vec<Incident>, Option<i64>);

/// Replays what Kafka still holds of a log.
pub fn from_kafka(brokers: &str, topics: &Topics, partitions: i32, config: &DetectorsConfig) -> Result<Told, Failure> {
    let (cluster, layout) = kafka::connect(brokers, &[&topics.telemetry, &topics.incidents], PATIENCE)?;
    kafka::require(&layout, &topics.telemetry, partitions, brokers)?;
    kafka::require(&layout, &topics.incidents, INCIDENT_PARTITIONS, brokers)?;
    let log_id = kafka::log_id(&cluster, &topics.telemetry);
    let mut rehearsal = Rehearsal::new(&log_id, &topics.telemetry, config);
    for partition in 0..partitions {
        let mut stage = rehearsal.stage(partition);
        topic::partition(brokers, &topics.telemetry, partition, |offset, appended_at, body| {
            rehearsal.take(&mut stage, offset, appended_at, &body);
        })?;
    }
    let then = topic::incidents(brokers, &topics.incidents, INCIDENT_PARTITIONS, &log_id)?;
    let first_at = rehearsal.first_at;
    Ok((then, rehearsal.finish(&topics.partials), first_at))
}

/// Replays what a lake holds of a log, up to the end of the range. What could not be decoded is not in the lake's tables
/// as records, so that `coverage_gap` is left out on both sides.
pub fn from_lake(
    folder: &Path,
    log: Option<&str>,
    config: &DetectorsConfig,
    range: difference::Range,
) -> Result<Told, Failure> {
    let lake = Lake::open(folder)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::external(format!("cannot start: {error}")))?;
    let logs = runtime.block_on(lake::logs(&lake))?;
    let mut fitting = logs.iter().filter(|(id, ..)| log.is_none_or(|log| log == id));
    let (log_id, topic, partitions) = match (fitting.next(), fitting.next()) {
        (Some(one), None) => one,
        (None, _) => {
            return Err(Failure::config(format!(
                "the lake {} holds no telemetry{}",
                folder.display(),
                log.map_or_else(String::new, |log| format!(" of the log {log}"))
            )));
        }
        _ => {
            let known: Vec<&str> = logs.iter().map(|(id, ..)| id.as_str()).collect();
            return Err(Failure::usage(format!("--log says which log to replay: {}", known.join(", "))));
        }
    };
    let mut rehearsal = Rehearsal::new(log_id, topic, config);
    for partition in partitions {
        let until = range.to.checked_add(AFTER);
        let kept = runtime.block_on(lake::partition(&lake, log_id, topic, *partition, until, WANTED))?;
        let mut stage = rehearsal.stage(*partition);
        for kept in kept {
            rehearsal.take(&mut stage, kept.offset, Some(kept.appended_at), &Body::Record(kept.record));
        }
    }
    let mut then = runtime.block_on(lake::incidents(&lake, log_id))?;
    then.retain(|incident| incident.kind != "coverage_gap");
    let first_at = rehearsal.first_at;
    let mut now = rehearsal.finish("fleet.partials");
    now.retain(|incident| incident.kind != "coverage_gap");
    Ok((then, now, first_at))
}

/// A record of the telemetry topic: as its bytes, or decoded already.
#[derive(Clone, Debug)]
pub enum Body {
    Bytes(Vec<u8>),
    Record(Telemetry),
}

/// What stage 1 has sent, with the watermark at which it did.
struct Sent {
    watermark: i64,
    task: usize,
    record: Upstream,
}

/// Both stages over one log, one partition after the other.
pub struct Rehearsal {
    log_id: String,
    topic: String,
    config: DetectorsConfig,
    sent: Vec<Sent>,
    /// Tasks of stage 1 that had a record: nobody waits for the others.
    spoke: BTreeSet<String>,
    revisions: Vec<Incident>,
    /// Event time of the first record.
    pub first_at: Option<i64>,
}

impl Rehearsal {
    pub fn new(log_id: &str, topic: &str, config: &DetectorsConfig) -> Rehearsal {
        Rehearsal {
            log_id: log_id.to_owned(),
            topic: topic.to_owned(),
            config: config.clone(),
            sent: Vec::new(),
            spoke: BTreeSet::new(),
            revisions: Vec::new(),
            first_at: None,
        }
    }

    fn id(&self, topic: &str, partition: i32) -> TaskId {
        TaskId { log_id: self.log_id.clone(), topic: topic.to_owned(), partition }
    }

    /// Stage 1 of one partition, to be fed its records in offset order.
    pub fn stage(&self, partition: i32) -> Task {
        Task::new(self.id(&self.topic, partition), &self.config)
    }

    pub fn take(&mut self, task: &mut Task, offset: i64, appended_at: Option<i64>, body: &Body) {
        let (mut outputs, first) = (Vec::new(), task.watermark().is_none());
        match body {
            Body::Bytes(payload) => task.step(Input { offset, appended_at, payload }, &mut outputs),
            Body::Record(record) => task.take(offset, appended_at, record, &mut outputs),
        }
        if let Some(watermark) = task.watermark().filter(|_| first) {
            let first_at = watermark + self.config.engine.disorder_bound;
            self.first_at = Some(self.first_at.map_or(first_at, |before| before.min(first_at)));
        }
        if task.watermark().is_some() && first {
            self.spoke.insert(task.id().to_string());
        }
        let partition = usize::try_from(task.id().partition).unwrap_or(usize::MAX);
        self.keep(task.watermark().unwrap_or(i64::MIN), partition, &mut outputs);
    }

    fn keep(&mut self, watermark: i64, task: usize, outputs: &mut Vec<Output>) {
        for output in outputs.drain(..) {
            match output {
                Output::Incident(incident) => self.revisions.push(*incident),
                Output::Group { record, .. } | Output::Everyone(record) => {
                    self.sent.push(Sent { watermark, task, record });
                }
                Output::Tombstone { .. } | Output::Itself(_) => {}
            }
        }
    }

    /// Stage 2 over what stage 1 has sent, in event-time order; gives every revision of every incident. One task stands
    /// for all partitions of the partials: a group's incidents do not depend on its neighbours.
    pub fn finish(mut self, partials: &str) -> Vec<Incident> {
        let mut task = GroupTask::new(self.id(partials, 0), std::mem::take(&mut self.spoke), &self.config);
        // Stable: what one task has sent keeps its order.
        self.sent.sort_by_key(|sent| (sent.watermark, sent.task));
        let mut outputs = Vec::new();
        for (offset, Sent { record, .. }) in (0..).zip(self.sent) {
            task.take(offset, None, &record, &mut outputs);
            self.revisions.extend(outputs.drain(..).filter_map(|output| match output {
                Output::Incident(incident) => Some(*incident),
                _ => None,
            }));
        }
        self.revisions
    }
}
