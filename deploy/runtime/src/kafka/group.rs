//! A member of a consumer group: reads the partitions that the group gives it, from where their owner says.
//!
//! Cooperative assignment, so that a rebalance stops only the partitions that move; static membership where a name is
//! given, so that a restart moves nothing. The group's offsets are for display: what an owner reads next is its own
//! matter. One consumer is polled by one thread, and rebalances are served in that poll.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext};
use rdkafka::error::KafkaError;
use rdkafka::types::RDKafkaRespErr;
use rdkafka::{Offset, TopicPartitionList};

use super::{Context, Message, base, taken, unreachable, watermarks};
use crate::exit::Failure;

/// Options of a group's members.
#[derive(clap::Args, Clone, Debug)]
pub struct GroupArgs {
    /// Members of one group share the partitions
    #[arg(long, value_name = "NAME", default_value = "gpufleet-detect")]
    pub group: String,
    /// Name of this member: a restart under the same name moves no partition
    #[arg(long, value_name = "NAME")]
    pub instance: Option<String>,
    /// A member that is silent for so long loses its partitions
    #[arg(long, value_name = "SPAN", default_value = "45s", value_parser = humantime::parse_duration)]
    pub session_timeout: Duration,
}

/// Who works on the partitions that a member is given.
pub trait Owner: Send {
    /// Takes a partition; gives the offset to read from.
    fn assigned(&mut self, partition: i32) -> Result<i64, Failure>;

    /// Gives a partition up in good order.
    fn revoked(&mut self, partition: i32) -> Result<(), Failure>;

    /// Drops a partition that somebody else owns already.
    fn lost(&mut self, partition: i32);

    /// What the group shall be told: partitions and their next offsets.
    fn commits(&mut self) -> Vec<(i32, i64)>;
}

struct Shared<O> {
    owner: Mutex<O>,
    failed: Mutex<Option<Failure>>,
    plain: Context,
    topic: String,
}

#[derive(Clone)]
struct GroupContext<O>(Arc<Shared<O>>);

/// A thread that panicked while it held the lock has ended the process's usefulness; the state behind is still whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<O: Owner + 'static> ClientContext for GroupContext<O> {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        self.0.plain.log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.0.plain.error(error, reason);
    }
}

impl<O: Owner + 'static> ConsumerContext for GroupContext<O> {
    fn rebalance(&self, consumer: &BaseConsumer<Self>, err: RDKafkaRespErr, partitions: &mut TopicPartitionList) {
        let numbers: Vec<i32> = partitions.elements().iter().map(|element| element.partition()).collect();
        let result = match err {
            RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS => self.assign(consumer, &numbers),
            RDKafkaRespErr::RD_KAFKA_RESP_ERR__REVOKE_PARTITIONS => self.revoke(consumer, &numbers, partitions),
            _ => Err(Failure::external(format!("the group cannot share {} out", self.0.topic))),
        };
        if let Err(failure) = result {
            lock(&self.0.failed).get_or_insert(failure);
        }
    }
}

impl<O: Owner + 'static> GroupContext<O> {
    fn assign(&self, consumer: &BaseConsumer<Self>, numbers: &[i32]) -> Result<(), Failure> {
        tracing::info!(topic = self.0.topic, partitions = ?numbers, "partitions assigned");
        let mut starts = TopicPartitionList::new();
        for partition in numbers {
            let offset = lock(&self.0.owner).assigned(*partition)?;
            starts
                .add_partition_offset(&self.0.topic, *partition, Offset::Offset(offset))
                .map_err(|error| Failure::bug(format!("cannot start at offset {offset}: {error}")))?;
        }
        consumer
            .incremental_assign(&starts)
            .map_err(|error| Failure::external(format!("cannot take partitions: {error}")))
    }

    fn revoke(
        &self,
        consumer: &BaseConsumer<Self>,
        numbers: &[i32],
        partitions: &TopicPartitionList,
    ) -> Result<(), Failure> {
        // After a panic the owner may have taken half a record: what it holds is worth nothing.
        if self.0.owner.is_poisoned() {
            return Ok(());
        }
        let lost = consumer.assignment_lost();
        tracing::info!(topic = self.0.topic, partitions = ?numbers, lost, "partitions revoked");
        let mut result = Ok(());
        {
            let mut owner = lock(&self.0.owner);
            for partition in numbers {
                if lost {
                    owner.lost(*partition);
                } else if let Err(failure) = owner.revoked(*partition) {
                    result = Err(failure);
                }
            }
        }
        if !lost {
            self.commit(consumer, CommitMode::Sync);
        }
        // A consumer that is closing has nothing to hand back.
        if let Err(error) = consumer.incremental_unassign(partitions) {
            tracing::debug!(%error, "partitions were gone already");
        }
        result
    }

    fn commit(&self, consumer: &BaseConsumer<Self>, mode: CommitMode) {
        let commits = lock(&self.0.owner).commits();
        if commits.is_empty() {
            return;
        }
        let mut offsets = TopicPartitionList::new();
        for (partition, offset) in commits {
            if let Err(error) = offsets.add_partition_offset(&self.0.topic, partition, Offset::Offset(offset)) {
                tracing::debug!(%error, "an offset is not shown");
            }
        }
        // For display only: the next commit says the same and more.
        if let Err(error) = consumer.commit(&offsets, mode) {
            tracing::debug!(%error, "the group was not told how far it is");
        }
    }
}

/// A member of a group.
pub struct Group<O: Owner + 'static> {
    consumer: BaseConsumer<GroupContext<O>>,
    shared: Arc<Shared<O>>,
    brokers: String,
}

impl<O: Owner + 'static> Group<O> {
    /// Joins the group of `args`, as member `member` of this process.
    pub fn join(brokers: &str, topic: &str, args: &GroupArgs, member: &str, owner: O) -> Result<Group<O>, Failure> {
        let shared = Arc::new(Shared {
            owner: Mutex::new(owner),
            failed: Mutex::new(None),
            plain: Context::default(),
            topic: topic.to_owned(),
        });
        let session = args.session_timeout.as_millis();
        let mut config = base(brokers);
        config
            .set("group.id", format!("{}.{topic}", args.group))
            .set("partition.assignment.strategy", "cooperative-sticky")
            .set("session.timeout.ms", session.to_string())
            .set("heartbeat.interval.ms", (session / 10).clamp(100, 3000).to_string())
            .set("enable.auto.commit", "false")
            .set("enable.auto.offset.store", "false")
            .set("auto.offset.reset", "error")
            .set("enable.partition.eof", "false")
            .set("check.crcs", "true")
            .set("fetch.wait.max.ms", "10")
            .set("fetch.queue.backoff.ms", "2")
            .set("queued.min.messages", "1000")
            .set("queued.max.messages.kbytes", "16384");
        if let Some(instance) = &args.instance {
            config.set("group.instance.id", format!("{instance}-{member}"));
        }
        let consumer: BaseConsumer<GroupContext<O>> = config
            .create_with_context(GroupContext(shared.clone()))
            .map_err(|error| Failure::config(format!("the Kafka settings are not valid: {error}")))?;
        consumer.subscribe(&[topic]).map_err(|error| unreachable(brokers, &error))?;
        Ok(Group { consumer, shared, brokers: brokers.to_owned() })
    }

    /// The next record, or none when nothing came within `patience`.
    pub fn next(&self, patience: Duration) -> Result<Option<Message>, Failure> {
        let polled = self.consumer.poll(patience);
        if let Some(failure) = lock(&self.shared.failed).take() {
            return Err(failure);
        }
        polled.map_or(Ok(None), |polled| taken(polled, &self.brokers))
    }

    pub fn owner(&self) -> MutexGuard<'_, O> {
        lock(&self.shared.owner)
    }

    /// Tells the group what its owner wants it to know.
    pub fn commit(&self) {
        GroupContext(self.shared.clone()).commit(&self.consumer, CommitMode::Async);
    }

    /// First and next offset of a partition.
    pub fn watermarks(&self, partition: i32) -> Result<(i64, i64), Failure> {
        watermarks(&self.consumer, &self.brokers, &self.shared.topic, partition)
    }
}
