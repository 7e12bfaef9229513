//! The log as the workers write it on Kafka: incidents and partials out, and what is out already.
//!
//! One idempotent writer a worker. Every append has a number; the worker learns up to which number all are acknowledged.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gpufleet_runtime::exit::{Failure, Fault};
use gpufleet_runtime::failpoint;
use gpufleet_runtime::kafka::{Destination, Message, Reader, Start, Writer, bounds, offsets};
use gpufleet_schemas::Topics;
use gpufleet_schemas::wire::Decoder;

use crate::worker::log::{Log, Said, Stream};
use crate::worker::snapshot::hash_of;

/// Longest that a closing task waits for the broker.
const PATIENCE: Duration = Duration::from_secs(60);

/// The topics that detection reads and writes, with their partition counts.
#[derive(Clone, Debug)]
pub struct Outlets {
    pub brokers: String,
    pub topics: Topics,
    pub incidents: i32,
    pub partials: i32,
}

/// Every task's incidents that are in the topic, read on once for all workers of the process.
#[derive(Default)]
pub struct Archive {
    next: BTreeMap<i32, i64>,
    said: BTreeMap<String, Vec<Said>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Default)]
struct InFlight {
    numbers: BTreeSet<u64>,
    refused: Option<String>,
}

/// The log on Kafka.
pub struct KafkaLog {
    outlets: Outlets,
    /// Topic of the input.
    input: String,
    writer: Writer,
    appended: u64,
    in_flight: Arc<Mutex<InFlight>>,
    archive: Arc<Mutex<Archive>>,
    pub commits: Vec<(i32, i64)>,
}

impl KafkaLog {
    pub fn open(outlets: Outlets, input: &str, archive: Arc<Mutex<Archive>>) -> Result<KafkaLog, Failure> {
        Ok(KafkaLog {
            writer: Writer::open(&outlets.brokers)?,
            outlets,
            input: input.to_owned(),
            appended: 0,
            in_flight: Arc::default(),
            archive,
            commits: Vec::new(),
        })
    }

    /// Writes a record of time into the input.
    pub fn tick(&self, partition: i32, payload: &[u8]) -> Result<(), Failure> {
        self.writer.send(Destination { topic: &self.input, partition }, b"tick", Some(payload), &[], |_| {})
    }
}

impl Log for KafkaLog {
    fn bounds(&mut self, partition: i32) -> Result<(i64, i64), Failure> {
        patiently(|| bounds(&self.outlets.brokers, &self.input, partition))
    }

    fn partitions(&self, stream: Stream) -> i32 {
        match stream {
            Stream::Incidents => self.outlets.incidents,
            Stream::Partials => self.outlets.partials,
        }
    }

    fn said(&mut self, task: &str) -> Result<Vec<Said>, Failure> {
        let Outlets { brokers, topics, incidents, .. } = &self.outlets;
        let mut archive = lock(&self.archive);
        let (messages, next) = patiently(|| read_on(brokers, &topics.incidents, *incidents, &archive.next))?;
        archive.next = next;
        let decoder = Decoder::default();
        for message in messages {
            // What is no incident is a tombstone, or was not written by a task.
            if let Ok(incident) = decoder.incident(&message.payload) {
                let said = Said { partition: message.partition, hash: hash_of(&message.payload), incident };
                archive.said.entry(said.incident.task.clone()).or_default().push(said);
            }
        }
        Ok(archive.said.get(task).cloned().unwrap_or_default())
    }

    fn append(&mut self, stream: Stream, partition: i32, key: &[u8], payload: Option<&[u8]>) -> Result<(), Failure> {
        let topics = &self.outlets.topics;
        let topic = match stream {
            Stream::Incidents => &topics.incidents,
            Stream::Partials => &topics.partials,
        };
        let (number, in_flight) = (self.appended, self.in_flight.clone());
        lock(&self.in_flight).numbers.insert(number);
        self.appended += 1;
        self.writer.send(Destination { topic, partition }, key, payload, &[], move |delivery| {
            let mut in_flight = lock(&in_flight);
            in_flight.numbers.remove(&number);
            if let Err(error) = delivery {
                in_flight.refused.get_or_insert(error);
            }
            drop(in_flight);
            if stream == Stream::Incidents {
                failpoint::reached("detect.after_acknowledgement");
            }
        })
    }

    fn acknowledged(&mut self) -> Result<u64, Failure> {
        let in_flight = lock(&self.in_flight);
        match &in_flight.refused {
            Some(error) => Err(Failure::external(format!(
                "the broker at {} refused what detection has found: {error}",
                self.outlets.brokers
            ))),
            None => Ok(in_flight.numbers.first().copied().unwrap_or(self.appended)),
        }
    }

    fn flush(&mut self) -> Result<(), Failure> {
        self.writer.flush(PATIENCE)
    }

    fn commit(&mut self, partition: i32, next_offset: i64) -> Result<(), Failure> {
        self.commits.push((partition, next_offset));
        Ok(())
    }
}

/// A broker that does not answer while a partition is taken may be about to: the partition waits, the process goes on.
fn patiently<T>(mut ask: impl FnMut() -> Result<T, Failure>) -> Result<T, Failure> {
    let start = Instant::now();
    loop {
        match ask() {
            Err(failure) if failure.fault == Fault::External && start.elapsed() < PATIENCE => {
                tracing::warn!(%failure, "asking again");
                std::thread::sleep(Duration::from_millis(500));
            }
            answer => return answer,
        }
    }
}

/// Everything that a topic holds now.
pub fn read_all(brokers: &str, topic: &str, partitions: i32) -> Result<Vec<Message>, Failure> {
    read_on(brokers, topic, partitions, &BTreeMap::new()).map(|(messages, _)| messages)
}

/// What a topic holds from `next` on, and the offsets to read on from.
fn read_on(
    brokers: &str,
    topic: &str,
    partitions: i32,
    next: &BTreeMap<i32, i64>,
) -> Result<(Vec<Message>, BTreeMap<i32, i64>), Failure> {
    let (mut starts, mut missing, mut after) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
    for (partition, (low, high)) in (0..).zip(offsets(brokers, topic, partitions)?) {
        let offset = next.get(&partition).copied().unwrap_or(low).max(low);
        if offset < high {
            starts.push(Start { topic: topic.to_owned(), partition, offset });
            missing.insert(partition, high);
        }
        after.insert(partition, high.max(offset));
    }
    let mut messages = Vec::new();
    if missing.is_empty() {
        return Ok((messages, after));
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
                if after.get(&message.partition).is_some_and(|end| message.offset < *end) {
                    messages.push(message);
                }
            }
            None if quiet_since.elapsed() > PATIENCE => {
                return Err(Failure::external(format!(
                    "the topic {topic} at {brokers} stopped answering before its end"
                )));
            }
            None => {}
        }
    }
    Ok((messages, after))
}
