//! Records out: from a source to the telemetry topic, each host's in its one partition, time as records in between.
//!
//! The publisher waits while the producer's bounded queue is full, and while a reader that it was told to heed is too
//! far behind; it never drops what a source has handed over.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gpufleet_runtime::exit::Failure;
use gpufleet_runtime::kafka::{Destination, Writer};
use gpufleet_runtime::progress::Progress;
use gpufleet_schemas::instant::SECOND;
use gpufleet_schemas::partition::partition_of;
use gpufleet_schemas::record::{Telemetry, Tick};
use gpufleet_schemas::wire::Encoder;

use crate::source::Source;

/// How long the end of a run waits for the broker.
const PATIENCE: Duration = Duration::from_secs(300);
/// A reader further behind than this holds the source back. An embedded broker keeps 5 MiB a partition.
const HEED_BYTES: u64 = 2 << 20;
/// After the last record of a recording, time goes on until every window of it has closed and settled.
const LINGER: i64 = 120 * SECOND;

/// What the broker has acknowledged.
#[derive(Clone, Debug, Default)]
pub struct Acknowledged {
    samples: Arc<AtomicU64>,
    events: Arc<AtomicU64>,
    bytes: Arc<AtomicU64>,
}

impl Acknowledged {
    pub fn samples(&self) -> u64 {
        self.samples.load(Ordering::SeqCst)
    }

    pub fn events(&self) -> u64 {
        self.events.load(Ordering::SeqCst)
    }

    /// Payload bytes of batches and events.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::SeqCst)
    }
}

/// Publishes records.
pub struct Publisher {
    writer: Writer,
    encoder: Encoder,
    topic: String,
    partitions: i32,
    /// Names the source of time in ticks; none leaves time to the records themselves.
    clock: Option<String>,
    buffer: Vec<u8>,
    ticked: Option<i64>,
    acknowledged: Acknowledged,
    heed: Vec<Progress>,
    sent_bytes: Vec<u64>,
}

impl Publisher {
    /// Publishes to `topic` of `partitions` partitions at `brokers`; with a `clock`, the
    /// source is its partitions' source of time and its seconds become ticks.
    pub fn open(brokers: &str, topic: &str, partitions: i32, clock: Option<&str>) -> Result<Publisher, Failure> {
        Ok(Publisher {
            writer: Writer::open(brokers)?,
            encoder: Encoder::default(),
            topic: topic.to_owned(),
            partitions,
            clock: clock.map(str::to_owned),
            buffer: Vec::new(),
            ticked: None,
            acknowledged: Acknowledged::default(),
            heed: Vec::new(),
            sent_bytes: vec![0; usize::try_from(partitions).unwrap_or(0)],
        })
    }

    /// Waits for these readers whenever they fall behind.
    pub fn heed(mut self, readers: Vec<Progress>) -> Publisher {
        self.heed = readers;
        self
    }

    pub fn acknowledged(&self) -> Acknowledged {
        self.acknowledged.clone()
    }

    /// Publishes everything that a source has, at no more than `pace`, and waits until it is acknowledged. `watch` sees
    /// each record and says whether to go on.
    pub fn run(
        &mut self,
        source: &mut dyn Source,
        pace: &Pace,
        watch: &mut dyn FnMut(&Telemetry) -> bool,
    ) -> Result<(), Failure> {
        let mut newest = None;
        while let Some(record) = source.next().map_err(Failure::from)? {
            let at = record.newest_at();
            newest = newest.max(Some(at));
            pace.wait(at);
            if !watch(&record) {
                break;
            }
            self.publish(&record)?;
        }
        if let Some(newest) = newest {
            self.tick_to(newest.saturating_add(LINGER))?;
        }
        self.writer.flush(PATIENCE)
    }

    /// Hands one record to the broker, after the ticks that its time calls for.
    pub fn publish(&mut self, record: &Telemetry) -> Result<(), Failure> {
        let (host, samples, events) = match record {
            Telemetry::Batch(batch) => (batch.origin.host.as_str(), batch.sample_count() as u64, 0),
            Telemetry::Event(event) => (event.origin.host.as_str(), 0, 1),
            Telemetry::Tick(tick) => return self.tick_to(tick.tick_at),
            Telemetry::Topology(_) => return self.publish_everywhere(record),
        };
        let partition = partition_of(host, self.partitions);
        self.tick_to(record.newest_at())?;
        self.encoder.telemetry(record, &mut self.buffer);
        let (bytes, acknowledged) = (self.buffer.len() as u64, self.acknowledged.clone());
        self.hold_back(partition, bytes);
        let to = Destination { topic: &self.topic, partition };
        self.writer.send(to, host.as_bytes(), Some(&self.buffer), &[], move |delivery| {
            if delivery.is_ok() {
                acknowledged.samples.fetch_add(samples, Ordering::SeqCst);
                acknowledged.events.fetch_add(events, Ordering::SeqCst);
                acknowledged.bytes.fetch_add(bytes, Ordering::SeqCst);
            }
        })
    }

    /// An epoch record: into every partition.
    fn publish_everywhere(&mut self, record: &Telemetry) -> Result<(), Failure> {
        self.encoder.telemetry(record, &mut self.buffer);
        for partition in 0..self.partitions {
            self.hold_back(partition, self.buffer.len() as u64);
            let to = Destination { topic: &self.topic, partition };
            self.writer.send(to, b"topology", Some(&self.buffer), &[], |_| {})?;
        }
        Ok(())
    }

    /// Writes a tick for every second up to `at` to every partition, so that one without data closes its windows too. A
    /// pause of more than the engine ever looks ahead needs no tick for each of its seconds.
    fn tick_to(&mut self, at: i64) -> Result<(), Failure> {
        let Some(writer) = self.clock.clone() else { return Ok(()) };
        let second = at.div_euclid(SECOND);
        let from = self.ticked.map_or(second, |ticked| (ticked + 1).max(second - LINGER / SECOND));
        for second in from..=second {
            for partition in 0..self.partitions {
                let tick = Telemetry::Tick(Tick { tick_at: second * SECOND, writer: writer.clone() });
                self.encoder.telemetry(&tick, &mut self.buffer);
                self.hold_back(partition, self.buffer.len() as u64);
                let to = Destination { topic: &self.topic, partition };
                self.writer.send(to, b"tick", Some(&self.buffer), &[], |_| {})?;
            }
            self.ticked = Some(second);
        }
        Ok(())
    }

    /// Waits while a reader that is heeded is too far behind.
    fn hold_back(&mut self, partition: i32, bytes: u64) {
        let Some(sent) = usize::try_from(partition).ok().and_then(|p| self.sent_bytes.get_mut(p)) else { return };
        *sent += bytes;
        let limit = sent.saturating_sub(HEED_BYTES);
        while self.heed.iter().any(|reader| reader.bytes(partition) < limit && !reader.stopping()) {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// How fast the time of a source may go by.
#[derive(Clone, Copy, Debug)]
pub enum Pace {
    /// As fast as it can be read.
    Unbound,
    /// `speed` microseconds of source time a microsecond of wall time, from `start` on.
    Scaled { start: Instant, from: i64, speed: f64 },
}

impl Pace {
    fn wait(&self, at: i64) {
        if let Pace::Scaled { start, from, speed } = self {
            let due = Duration::from_secs_f64(((at - from).max(0) as f64 / speed / SECOND as f64).max(0.0));
            if let Some(rest) = due.checked_sub(start.elapsed()) {
                std::thread::sleep(rest);
            }
        }
    }
}
