//! A log in memory, for simulation: what is appended waits until the simulation acknowledges it, or is lost with its
//! writer.
//!
//! Deterministic: time and order are whatever the simulation makes them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use gpufleet_runtime::exit::Failure;
use gpufleet_schemas::wire::Decoder;

use super::log::{Log, Said, Stream};
use super::snapshot::hash_of;

/// A record of the log in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    pub appended_at: i64,
    pub key: Vec<u8>,
    pub payload: Option<Vec<u8>>,
}

/// The broker: partitions of records.
#[derive(Debug, Default)]
pub struct Broker {
    topics: BTreeMap<(Stream, i32), Vec<Stored>>,
    /// Virtual time, microseconds.
    pub now: i64,
    /// What the group of each topic was told per partition.
    pub committed: BTreeMap<(String, i32), i64>,
}

impl Broker {
    pub fn append(&mut self, stream: Stream, partition: i32, key: &[u8], payload: Option<&[u8]>) {
        let stored = Stored { appended_at: self.now, key: key.to_vec(), payload: payload.map(<[u8]>::to_vec) };
        self.topics.entry((stream, partition)).or_default().push(stored);
    }

    /// The records of a partition, its offset their place.
    pub fn partition(&self, stream: Stream, partition: i32) -> &[Stored] {
        self.topics.get(&(stream, partition)).map_or(&[], Vec::as_slice)
    }
}

/// One writer's hand on the broker.
pub struct MemoryLog {
    broker: Rc<RefCell<Broker>>,
    /// Name of the input, and how long its partitions are.
    input: String,
    length: Box<dyn Fn(i32) -> i64>,
    incidents: i32,
    partials: i32,
    /// Appends that the broker has not taken yet.
    in_flight: Vec<(Stream, i32, Vec<u8>, Option<Vec<u8>>)>,
    acknowledged: u64,
}

impl MemoryLog {
    pub fn new(
        broker: Rc<RefCell<Broker>>,
        input: &str,
        length: impl Fn(i32) -> i64 + 'static,
        incidents: i32,
        partials: i32,
    ) -> MemoryLog {
        let (input, length) = (input.to_owned(), Box::new(length));
        MemoryLog { broker, input, length, incidents, partials, in_flight: Vec::new(), acknowledged: 0 }
    }

    /// Lets the broker take the oldest `count` appends that are in flight, and acknowledge them if it is `heard`.
    pub fn deliver(&mut self, count: usize, heard: bool) {
        let mut broker = self.broker.borrow_mut();
        for (stream, partition, key, payload) in self.in_flight.drain(..count.min(self.in_flight.len())) {
            broker.append(stream, partition, &key, payload.as_deref());
            self.acknowledged += u64::from(heard);
        }
    }

    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }
}

impl Log for MemoryLog {
    fn bounds(&mut self, partition: i32) -> Result<(i64, i64), Failure> {
        Ok((0, (self.length)(partition)))
    }

    fn partitions(&self, stream: Stream) -> i32 {
        match stream {
            Stream::Incidents => self.incidents,
            Stream::Partials => self.partials,
        }
    }

    fn said(&mut self, task: &str) -> Result<Vec<Said>, Failure> {
        let (broker, decoder, mut said) = (self.broker.borrow(), Decoder::default(), Vec::new());
        for partition in 0..self.incidents {
            for payload in broker.partition(Stream::Incidents, partition).iter().filter_map(|s| s.payload.as_ref()) {
                if let Ok(incident) = decoder.incident(payload)
                    && incident.task == task
                {
                    said.push(Said { partition, incident, hash: hash_of(payload) });
                }
            }
        }
        Ok(said)
    }

    fn append(&mut self, stream: Stream, partition: i32, key: &[u8], payload: Option<&[u8]>) -> Result<(), Failure> {
        self.in_flight.push((stream, partition, key.to_vec(), payload.map(<[u8]>::to_vec)));
        Ok(())
    }

    fn acknowledged(&mut self) -> Result<u64, Failure> {
        Ok(self.acknowledged)
    }

    fn flush(&mut self) -> Result<(), Failure> {
        self.deliver(self.in_flight.len(), true);
        Ok(())
    }

    fn commit(&mut self, partition: i32, next_offset: i64) -> Result<(), Failure> {
        self.broker.borrow_mut().committed.insert((self.input.clone(), partition), next_offset);
        Ok(())
    }
}
