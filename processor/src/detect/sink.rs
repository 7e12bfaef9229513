//! Incidents out: to the `incidents` topic, each once however often the log is replayed.
//!
//! A task numbers its outputs from 0, and a replay gives the same numbers and bytes. What is out already is read from
//! the topic itself at start and not sent again.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use gpufleet_runtime::exit::Failure;
use gpufleet_runtime::failpoint;
use gpufleet_runtime::kafka::{Destination, Reader, Start, Writer, offsets};
use gpufleet_schemas::partition::partition_of;
use gpufleet_schemas::record::Incident;
use gpufleet_schemas::wire::{Decoder, Encoder};

/// Longest that a closing task waits for the broker.
const PATIENCE: Duration = Duration::from_secs(60);

/// Sends incidents that are not out yet.
pub struct Sink {
    writer: Writer,
    topic: String,
    encoder: Encoder,
    partitions: i32,
    /// Highest output number of each task in each partition of the topic. Within one partition a task's numbers ascend,
    /// so everything up to it is out, also what compaction has taken away since.
    out: BTreeMap<(String, i32), i64>,
    buffer: Vec<u8>,
    pub sent: u64,
    pub suppressed: u64,
}

impl Sink {
    /// Opens the topic and learns what is out already.
    pub fn open(brokers: &str, topic: &str, partitions: i32) -> Result<Sink, Failure> {
        let out = already_out(brokers, topic, partitions)?;
        Ok(Sink {
            writer: Writer::open(brokers)?,
            topic: topic.to_owned(),
            encoder: Encoder::default(),
            partitions,
            out,
            buffer: Vec::new(),
            sent: 0,
            suppressed: 0,
        })
    }

    pub fn emit(&mut self, incident: &Incident) -> Result<(), Failure> {
        let partition = partition_of(&incident.id, self.partitions);
        if self.out.get(&(incident.task.clone(), partition)).is_some_and(|highest| incident.emit_seq <= *highest) {
            self.suppressed += 1;
            return Ok(());
        }
        self.encoder.incident(incident, &mut self.buffer);
        let to = Destination { topic: &self.topic, partition };
        self.writer.send(to, incident.id.as_bytes(), &self.buffer, &[], |delivery| {
            if let Err(error) = delivery {
                tracing::error!(error, "an incident was refused by the broker");
            }
            failpoint::reached("detect.after_acknowledgement");
        })?;
        failpoint::reached("detect.before_acknowledgement");
        self.sent += 1;
        Ok(())
    }

    /// Waits until every incident is acknowledged.
    pub fn flush(&self) -> Result<(), Failure> {
        self.writer.flush(PATIENCE)
    }
}

fn already_out(brokers: &str, topic: &str, partitions: i32) -> Result<BTreeMap<(String, i32), i64>, Failure> {
    let mut out = BTreeMap::new();
    let decoder = Decoder::default();
    for message in read_all(brokers, topic, partitions)? {
        // What is no incident was not written by a task.
        if let Ok(incident) = decoder.incident(&message.payload) {
            let highest = out.entry((incident.task, message.partition)).or_insert(incident.emit_seq);
            *highest = incident.emit_seq.max(*highest);
        }
    }
    Ok(out)
}

/// Everything that a topic holds now.
pub fn read_all(brokers: &str, topic: &str, partitions: i32) -> Result<Vec<gpufleet_runtime::kafka::Message>, Failure> {
    let ends = offsets(brokers, topic, partitions)?;
    let mut starts = Vec::new();
    for (partition, (low, high)) in ends.iter().enumerate() {
        if low < high {
            let partition = i32::try_from(partition).unwrap_or(i32::MAX);
            starts.push(Start { topic: topic.to_owned(), partition, offset: *low });
        }
    }
    let mut missing: BTreeMap<i32, i64> =
        starts.iter().map(|start| (start.partition, ends[start.partition as usize].1)).collect();
    let mut messages = Vec::new();
    if missing.is_empty() {
        return Ok(messages);
    }
    let reader = Reader::open(brokers, &starts)?;
    let mut quiet_since = Instant::now();
    while !missing.is_empty() {
        match reader.next(Duration::from_millis(200))? {
            Some(message) => {
                quiet_since = Instant::now();
                if missing.get(&message.partition).is_some_and(|end| message.offset + 1 >= *end) {
                    missing.remove(&message.partition);
                }
                messages.push(message);
            }
            None if quiet_since.elapsed() > PATIENCE => {
                return Err(Failure::external(format!(
                    "the topic {topic} at {brokers} stopped answering before its end"
                )));
            }
            None => {}
        }
    }
    Ok(messages)
}
