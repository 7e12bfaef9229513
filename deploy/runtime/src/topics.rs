//! Creating and verifying the topics. Nothing else creates one.
//!
//! A topic that exists is never changed here: what differs is reported, for a person to decide.

use std::time::Duration;

use gpufleet_schemas::Topics;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, ResourceSpecifier, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::error::RDKafkaErrorCode;

use crate::exit::Failure;
use crate::kafka;

/// How a topic must be.
#[derive(Clone, Debug)]
pub struct Spec {
    pub name: String,
    pub partitions: i32,
    pub replication: i32,
    pub settings: Vec<(&'static str, String)>,
}

/// Default partition count of the telemetry topic; the producers and the processors must agree on it.
pub const DEFAULT_PARTITIONS: i32 = 8;
/// Default partition count of the partials topic.
pub const DEFAULT_PARTIALS: i32 = 32;
/// Partition count of the incidents topic.
pub const INCIDENT_PARTITIONS: i32 = 4;
/// Partition count of the dead-letter topic.
pub const DLQ_PARTITIONS: i32 = 1;

const DAY_MS: u64 = 86_400_000;

/// Every topic that this version uses.
pub fn specs(topics: &Topics, partitions: i32, partials: i32, replication: i32) -> Vec<Spec> {
    let in_sync = if replication >= 3 { 2 } else { 1 };
    let common = move |cleanup: &str, retention_ms: u64| {
        vec![
            ("cleanup.policy", cleanup.to_owned()),
            ("retention.ms", retention_ms.to_string()),
            // Retention then counts from arrival: a recording of last year is not deleted within minutes.
            ("message.timestamp.type", "LogAppendTime".to_owned()),
            ("compression.type", "producer".to_owned()),
            ("min.insync.replicas", in_sync.to_string()),
        ]
    };
    vec![
        Spec { name: topics.telemetry.clone(), partitions, replication, settings: common("delete", 2 * DAY_MS) },
        // Stage 2 never needs more than its snapshot's age of it.
        Spec {
            name: topics.partials.clone(),
            partitions: partials,
            replication,
            settings: common("delete", DAY_MS / 4),
        },
        Spec {
            name: topics.incidents.clone(),
            partitions: INCIDENT_PARTITIONS,
            replication,
            settings: {
                let mut settings = common("compact", 30 * DAY_MS);
                settings.push(("min.compaction.lag.ms", (DAY_MS / 24).to_string()));
                settings
            },
        },
        Spec {
            name: topics.dead_letters.clone(),
            partitions: DLQ_PARTITIONS,
            replication,
            settings: common("delete", 14 * DAY_MS),
        },
    ]
}

/// What `apply` did or found, one line each.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    pub created: Vec<String>,
    pub verified: Vec<String>,
    /// What differs from its specification.
    pub differs: Vec<String>,
}

/// Creates the topics that are missing and verifies the rest.
pub async fn apply(brokers: &str, specs: &[Spec], patience: Duration) -> Result<Outcome, Failure> {
    let names: Vec<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
    let (_, before) = kafka::connect(brokers, &names, patience)?;
    let admin: AdminClient<DefaultClientContext> = kafka::admin_config(brokers)
        .create()
        .map_err(|error| Failure::config(format!("the Kafka settings are not valid: {error}")))?;
    let options = AdminOptions::new().operation_timeout(Some(Duration::from_secs(30)));
    let mut outcome = Outcome::default();
    for spec in specs.iter().filter(|spec| before.iter().all(|found| found.name != spec.name)) {
        let mut new = NewTopic::new(&spec.name, spec.partitions, TopicReplication::Fixed(spec.replication));
        for (key, value) in &spec.settings {
            new = new.set(key, value);
        }
        let results =
            admin.create_topics([&new], &options).await.map_err(|error| kafka::unreachable(brokers, &error))?;
        match results.into_iter().next() {
            Some(Err((_, RDKafkaErrorCode::TopicAlreadyExists))) | Some(Ok(_)) | None => {
                outcome.created.push(spec.name.clone());
            }
            Some(Err((name, code))) => {
                return Err(Failure::external(format!(
                    "the broker at {brokers} does not create the topic {name}: {code}"
                )));
            }
        }
    }
    let (_, after) = settle(brokers, &names, patience)?;
    for spec in specs {
        verify(&admin, &options, spec, &after, brokers, patience, &mut outcome).await?;
    }
    Ok(outcome)
}

/// A new topic takes a moment to reach every broker's metadata.
fn settle(brokers: &str, names: &[&str], patience: Duration) -> Result<(String, Vec<kafka::TopicLayout>), Failure> {
    let start = std::time::Instant::now();
    loop {
        let (cluster, layout) = kafka::connect(brokers, names, patience)?;
        if layout.len() == names.len() || start.elapsed() > patience {
            return Ok((cluster, layout));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

async fn verify(
    admin: &AdminClient<DefaultClientContext>,
    options: &AdminOptions,
    spec: &Spec,
    layout: &[kafka::TopicLayout],
    brokers: &str,
    patience: Duration,
    outcome: &mut Outcome,
) -> Result<(), Failure> {
    let Some(found) = layout.iter().find(|found| found.name == spec.name) else {
        return Err(Failure::external(format!("the topic {} was created at {brokers} but does not appear", spec.name)));
    };
    let mut differs = Vec::new();
    if found.partitions != spec.partitions {
        differs.push(format!("{}: {} partitions, wanted {}", spec.name, found.partitions, spec.partitions));
    }
    let start = std::time::Instant::now();
    let resource = loop {
        let described = admin
            .describe_configs([&ResourceSpecifier::Topic(&spec.name)], options)
            .await
            .map_err(|error| kafka::unreachable(brokers, &error))?;
        match described.into_iter().next().and_then(Result::ok) {
            Some(resource) if spec.settings.iter().all(|(key, _)| resource.get(key).is_some()) => break resource,
            // A broker that has not heard of a new topic yet describes nothing of it.
            _ if start.elapsed() < patience => tokio::time::sleep(Duration::from_millis(100)).await,
            _ => {
                return Err(Failure::external(format!(
                    "the broker at {brokers} does not describe the topic {}",
                    spec.name
                )));
            }
        }
    };
    for (key, wanted) in &spec.settings {
        let value = resource.get(key).and_then(|entry| entry.value.clone()).unwrap_or_default();
        if value != *wanted {
            differs.push(format!("{}: {key} is {value}, wanted {wanted}", spec.name));
        }
    }
    if differs.is_empty() {
        outcome.verified.push(spec.name.clone());
    }
    outcome.differs.extend(differs);
    Ok(())
}
