//! The log read from Kafka for a replay: one partition of the telemetry topic, and the incidents that were emitted.

use std::time::{Duration, Instant};

use gpufleet_runtime::exit::Failure;
use gpufleet_runtime::kafka::{Reader, Start, bounds};
use gpufleet_schemas::record::Incident;
use gpufleet_schemas::wire::Decoder;

use super::Body;
use crate::detect::sink::read_all;

/// Longest that a broker may keep silent.
const PATIENCE: Duration = Duration::from_secs(30);

/// Everything that a partition holds now, in offset order, with the broker's stamps.
pub fn partition(
    brokers: &str,
    topic: &str,
    partition: i32,
    mut each: impl FnMut(i64, Option<i64>, Body),
) -> Result<(), Failure> {
    let (low, high) = bounds(brokers, topic, partition)?;
    if low == high {
        return Ok(());
    }
    let reader = Reader::open(brokers, &[Start { topic: topic.to_owned(), partition, offset: low }])?;
    let mut heard = Instant::now();
    loop {
        match reader.next(Duration::from_millis(200))? {
            Some(message) => {
                heard = Instant::now();
                let (offset, appended_at) = (message.offset, message.appended_at());
                each(offset, appended_at, Body::Bytes(message.payload));
                if offset + 1 >= high {
                    return Ok(());
                }
            }
            None if heard.elapsed() > PATIENCE => {
                return Err(Failure::external(format!(
                    "the topic {topic} at {brokers} stopped answering before its end"
                )));
            }
            None => {}
        }
    }
}

/// The revisions of a log's incidents that the topic still holds.
pub fn incidents(brokers: &str, topic: &str, partitions: i32, log_id: &str) -> Result<Vec<Incident>, Failure> {
    let decoder = Decoder::default();
    let messages = read_all(brokers, topic, partitions)?;
    let incidents = messages.iter().filter_map(|message| decoder.incident(&message.payload).ok());
    Ok(incidents.filter(|incident| incident.log_id == log_id).collect())
}
