//! The Kafka clients as gpufleet uses them: an idempotent writer with delivery reports, and a reader of assigned
//! partitions.
//!
//! Defaults of librdkafka that would bite are set here, in one place: no automatic topic creation, no offset reset,
//! no automatic commits, bounded queues, and a message that was accepted is retried until it is delivered.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rdkafka::client::ClientContext;
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, Message as _, OwnedHeaders};
use rdkafka::producer::{BaseRecord, DeliveryResult, Producer, ProducerContext, ThreadedProducer};
use rdkafka::{Offset, TopicPartitionList};

use crate::exit::Failure;
use crate::topics::DEFAULT_PARTITIONS;

mod group;

pub use group::{Group, GroupArgs, Owner};

const METADATA_TIMEOUT: Duration = Duration::from_secs(5);

/// Options of every command that talks to a cluster.
#[derive(clap::Args, Clone, Debug)]
pub struct BrokerArgs {
    #[arg(long, value_name = "HOST:PORT", env = "GPUFLEET_BROKERS")]
    pub brokers: String,
    /// Partitions of the telemetry topic; must be what the topic has
    #[arg(long, default_value_t = DEFAULT_PARTITIONS, value_parser = clap::value_parser!(i32).range(1..=1024))]
    pub partitions: i32,
    /// Goes before the topics' names, for a cluster that is shared
    #[arg(long, value_name = "PREFIX", default_value = "")]
    pub topic_prefix: String,
    /// How long to wait for a broker at start
    #[arg(long, value_name = "SPAN", default_value = "30s", value_parser = humantime::parse_duration)]
    pub patience: Duration,
}

/// Turns librdkafka's talk into our log: what repeats is said once.
#[derive(Debug, Default)]
pub struct Context {
    errors: AtomicU64,
}

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        tracing::debug!(?level, facility, message, "librdkafka");
    }

    fn error(&self, error: KafkaError, reason: &str) {
        let count = self.errors.fetch_add(1, Ordering::Relaxed);
        if count.is_power_of_two() || count == 0 {
            tracing::warn!(%error, reason, count, "broker trouble, retrying; nothing accepted is lost");
        }
    }
}

impl ConsumerContext for Context {}

/// What became of a record: its offset, or why it was given up.
pub type Delivery = Result<i64, String>;
type Receipt = Box<dyn FnOnce(Delivery) + Send + Sync>;

impl ProducerContext for Context {
    type DeliveryOpaque = Box<Receipt>;

    fn delivery(&self, result: &DeliveryResult<'_>, receipt: Self::DeliveryOpaque) {
        receipt(match result {
            Ok(message) => Ok(message.offset()),
            Err((error, _)) => Err(error.to_string()),
        });
    }
}

fn base(brokers: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", brokers)
        .set("client.id", "gpufleet")
        .set("allow.auto.create.topics", "false")
        .set("enable.metrics.push", "false")
        .set("reconnect.backoff.max.ms", "5000")
        .set_log_level(RDKafkaLogLevel::Warning);
    config
}

/// Says what to check when a broker does not answer.
pub fn unreachable(brokers: &str, error: &dyn std::fmt::Display) -> Failure {
    Failure::external(format!(
        "no Kafka broker answers at {brokers} ({error}); check the address and port, that the broker runs, and that its \
         advertised listeners can be reached from here"
    ))
}

/// A topic as a cluster has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicLayout {
    pub name: String,
    pub partitions: i32,
}

/// Waits until a broker answers, with growing pauses, and tells what it has of `topics`.
pub fn connect(brokers: &str, topics: &[&str], patience: Duration) -> Result<(String, Vec<TopicLayout>), Failure> {
    let consumer: BaseConsumer<Context> = base(brokers)
        .create_with_context(Context::default())
        .map_err(|error| Failure::config(format!("the Kafka settings are not valid: {error}")))?;
    let start = Instant::now();
    let mut pause = Duration::from_millis(250);
    loop {
        match consumer.fetch_metadata(None, METADATA_TIMEOUT.min(patience)) {
            Ok(metadata) => {
                let layout = metadata
                    .topics()
                    .iter()
                    .filter(|topic| topics.contains(&topic.name()) && topic.error().is_none())
                    .map(|topic| TopicLayout {
                        name: topic.name().to_owned(),
                        partitions: i32::try_from(topic.partitions().len()).unwrap_or(i32::MAX),
                    })
                    .collect();
                let cluster = consumer.client().fetch_cluster_id(METADATA_TIMEOUT);
                let cluster = cluster.ok_or_else(|| unreachable(brokers, &"it does not tell its cluster's id"))?;
                return Ok((cluster, layout));
            }
            Err(error) if start.elapsed() + pause >= patience => return Err(unreachable(brokers, &error)),
            Err(error) => {
                tracing::warn!(brokers, %error, retry_in_ms = pause.as_millis(), "no broker answers yet");
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_secs(5));
            }
        }
    }
}

/// Identity of a cluster's log: its offsets count from 0 once only.
pub fn log_id(cluster: &str, topic: &str) -> String {
    format!("{cluster}/{topic}")
}

/// Refuses a topic that is missing or has another partition count than the configuration says.
pub fn require(layout: &[TopicLayout], topic: &str, partitions: i32, brokers: &str) -> Result<(), Failure> {
    match layout.iter().find(|found| found.name == topic) {
        None => Err(Failure::config(format!(
            "the topic {topic} does not exist at {brokers}; create it with: gpufleet topics apply --brokers {brokers} \
             --partitions {partitions}"
        ))),
        Some(found) if found.partitions != partitions => Err(Failure::config(format!(
            "the topic {topic} has {} partitions but --partitions says {partitions}; hosts would move between partitions, \
             so start with --partitions {} or use another topic",
            found.partitions, found.partitions
        ))),
        Some(_) => Ok(()),
    }
}

/// Where a record goes.
#[derive(Clone, Copy, Debug)]
pub struct Destination<'a> {
    pub topic: &'a str,
    pub partition: i32,
}

/// An idempotent producer. A record that was accepted is retried until the broker has it.
pub struct Writer {
    producer: ThreadedProducer<Context>,
    brokers: String,
    in_flight: Arc<AtomicU64>,
    failed: Arc<AtomicU64>,
}

impl Writer {
    pub fn open(brokers: &str) -> Result<Writer, Failure> {
        let producer = base(brokers)
            .set("enable.idempotence", "true")
            .set("acks", "all")
            .set("compression.type", "zstd")
            .set("compression.level", "1")
            .set("linger.ms", "20")
            .set("batch.size", "1000000")
            .set("message.timeout.ms", "0")
            .set("queue.buffering.max.messages", "20000")
            .set("queue.buffering.max.kbytes", "65536")
            .create_with_context(Context::default())
            .map_err(|error| Failure::config(format!("the Kafka settings are not valid: {error}")))?;
        Ok(Writer { producer, brokers: brokers.to_owned(), in_flight: Arc::default(), failed: Arc::default() })
    }

    /// Hands a record to the producer; waits while its bounded queue is full. `receipt` runs when the broker has
    /// acknowledged it.
    pub fn send(
        &self,
        to: Destination<'_>,
        key: &[u8],
        payload: Option<&[u8]>,
        headers: &[(&str, &str)],
        receipt: impl FnOnce(Delivery) + Send + Sync + 'static,
    ) -> Result<(), Failure> {
        let (in_flight, failed) = (self.in_flight.clone(), self.failed.clone());
        self.in_flight.fetch_add(1, Ordering::SeqCst);
        let receipt: Receipt = Box::new(move |delivery| {
            if delivery.is_err() {
                failed.fetch_add(1, Ordering::SeqCst);
            }
            receipt(delivery);
            in_flight.fetch_sub(1, Ordering::SeqCst);
        });
        let mut record = BaseRecord::with_opaque_to(to.topic, Box::new(receipt)).partition(to.partition).key(key);
        record.payload = payload;
        if !headers.is_empty() {
            let mut owned = OwnedHeaders::new_with_capacity(headers.len());
            for (key, value) in headers {
                owned = owned.insert(Header { key, value: Some(*value) });
            }
            record = record.headers(owned);
        }
        loop {
            match self.producer.send(record) {
                Ok(()) => return Ok(()),
                Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), same)) => {
                    record = same;
                    std::thread::sleep(Duration::from_millis(2));
                }
                Err((error, _)) => {
                    self.in_flight.fetch_sub(1, Ordering::SeqCst);
                    return Err(Failure::external(format!(
                        "{} partition {} at {} takes no record: {error}",
                        to.topic, to.partition, self.brokers
                    )));
                }
            }
        }
    }

    /// Records that wait for their acknowledgement.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::SeqCst)
    }

    /// Waits until the broker has acknowledged everything that was accepted.
    pub fn flush(&self, patience: Duration) -> Result<(), Failure> {
        let start = Instant::now();
        while self.in_flight() > 0 {
            if start.elapsed() > patience {
                return Err(unreachable(
                    &self.brokers,
                    &format!("{} records wait for their acknowledgement", self.in_flight()),
                ));
            }
            // Wakes the sender thread instead of waiting for its linger.
            let _ = self.producer.flush(Duration::from_millis(200));
        }
        match self.failed.load(Ordering::SeqCst) {
            0 => Ok(()),
            failed => Err(Failure::external(format!("the broker at {} refused {failed} records", self.brokers))),
        }
    }
}

/// A record as it lies in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub topic: String,
    pub partition: i32,
    pub offset: i64,
    /// The broker's or the producer's stamp, microseconds; 0 where there is none.
    pub stamped_at: i64,
    pub key: Vec<u8>,
    pub payload: Vec<u8>,
}

impl Message {
    /// Event time may not lie after this.
    pub fn appended_at(&self) -> Option<i64> {
        (self.stamped_at > 0).then_some(self.stamped_at)
    }
}

/// Where to start reading one partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    pub topic: String,
    pub partition: i32,
    pub offset: i64,
}

/// Reads assigned partitions from given offsets, in offset order within each. Never skips silently: an offset that
/// the broker no longer has is an error.
pub struct Reader {
    consumer: BaseConsumer<Context>,
    brokers: String,
}

impl Reader {
    pub fn open(brokers: &str, starts: &[Start]) -> Result<Reader, Failure> {
        let consumer: BaseConsumer<Context> = base(brokers)
            // Partitions are assigned, not shared: the group only satisfies the client.
            .set("group.id", "gpufleet-assigned")
            .set("enable.auto.commit", "false")
            .set("enable.auto.offset.store", "false")
            .set("auto.offset.reset", "error")
            .set("enable.partition.eof", "false")
            .set("check.crcs", "true")
            .set("fetch.wait.max.ms", "10")
            .set("fetch.queue.backoff.ms", "2")
            .set("queued.min.messages", "1000")
            .set("queued.max.messages.kbytes", "16384")
            .create_with_context(Context::default())
            .map_err(|error| Failure::config(format!("the Kafka settings are not valid: {error}")))?;
        let mut assignment = TopicPartitionList::new();
        for start in starts {
            let (low, high) = watermarks(&consumer, brokers, &start.topic, start.partition)?;
            if start.offset < low || start.offset > high {
                return Err(Failure::external(format!(
                    "{} partition {} at {brokers} holds offsets {low} to {high} but {} is needed: retention overtook this \
                     reader, or the topic was recreated; restore the log, or start with a new lake",
                    start.topic, start.partition, start.offset
                )));
            }
            assignment
                .add_partition_offset(&start.topic, start.partition, Offset::Offset(start.offset))
                .map_err(|error| Failure::bug(format!("cannot assign {start:?}: {error}")))?;
        }
        consumer.assign(&assignment).map_err(|error| unreachable(brokers, &error))?;
        Ok(Reader { consumer, brokers: brokers.to_owned() })
    }

    /// The next record, or none when nothing came within `patience`.
    pub fn next(&self, patience: Duration) -> Result<Option<Message>, Failure> {
        match self.consumer.poll(patience) {
            None => Ok(None),
            Some(polled) => taken(polled, &self.brokers),
        }
    }

    /// First and next offset of a partition.
    pub fn watermarks(&self, topic: &str, partition: i32) -> Result<(i64, i64), Failure> {
        watermarks(&self.consumer, &self.brokers, topic, partition)
    }
}

/// What a poll gave: a record, a failure that does not heal, or nothing yet.
fn taken(
    polled: Result<rdkafka::message::BorrowedMessage<'_>, KafkaError>,
    brokers: &str,
) -> Result<Option<Message>, Failure> {
    match polled {
        Ok(message) => Ok(Some(Message {
            topic: message.topic().to_owned(),
            partition: message.partition(),
            offset: message.offset(),
            stamped_at: message.timestamp().to_millis().unwrap_or(0).saturating_mul(1000),
            key: message.key().unwrap_or_default().to_vec(),
            payload: message.payload().unwrap_or_default().to_vec(),
        })),
        Err(KafkaError::MessageConsumption(RDKafkaErrorCode::OffsetOutOfRange | RDKafkaErrorCode::AutoOffsetReset)) => {
            Err(Failure::external(format!(
                "the log at {brokers} no longer holds the next offset: its start overtook this reader"
            )))
        }
        Err(KafkaError::MessageConsumption(
            code @ (RDKafkaErrorCode::UnknownTopicOrPartition
            | RDKafkaErrorCode::TopicAuthorizationFailed
            | RDKafkaErrorCode::GroupAuthorizationFailed
            | RDKafkaErrorCode::FencedInstanceId
            | RDKafkaErrorCode::UnknownPartition
            | RDKafkaErrorCode::UnknownTopic),
        )) => Err(Failure::external(format!("cannot read from {brokers}: {code}"))),
        Err(error) => {
            tracing::debug!(%error, "the reader retries");
            Ok(None)
        }
    }
}

fn watermarks<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    brokers: &str,
    topic: &str,
    partition: i32,
) -> Result<(i64, i64), Failure> {
    consumer.fetch_watermarks(topic, partition, METADATA_TIMEOUT).map_err(|error| unreachable(brokers, &error))
}

/// First and next offset of one partition.
pub fn bounds(brokers: &str, topic: &str, partition: i32) -> Result<(i64, i64), Failure> {
    let consumer: BaseConsumer<Context> = base(brokers)
        .create_with_context(Context::default())
        .map_err(|error| Failure::config(format!("the Kafka settings are not valid: {error}")))?;
    watermarks(&consumer, brokers, topic, partition)
}

/// First and next offset of every partition of a topic, without reading it.
pub fn offsets(brokers: &str, topic: &str, partitions: i32) -> Result<Vec<(i64, i64)>, Failure> {
    let consumer: BaseConsumer<Context> = base(brokers)
        .create_with_context(Context::default())
        .map_err(|error| Failure::config(format!("the Kafka settings are not valid: {error}")))?;
    (0..partitions).map(|partition| watermarks(&consumer, brokers, topic, partition)).collect()
}

/// An admin client's settings, for `topics`.
pub(crate) fn admin_config(brokers: &str) -> ClientConfig {
    base(brokers)
}
