//! Records that are none: to the dead-letter topic, untouched, with where they came from and why as headers.

use std::time::Duration;

use gpufleet_runtime::exit::Failure;
use gpufleet_runtime::kafka::{Destination, Message, Writer};
use gpufleet_schemas::wire::DecodeError;

const PATIENCE: Duration = Duration::from_secs(60);

/// Writes dead letters.
pub struct DeadLetters {
    writer: Writer,
    topic: String,
    pub written: u64,
}

impl DeadLetters {
    pub fn open(brokers: &str, topic: &str) -> Result<DeadLetters, Failure> {
        Ok(DeadLetters { writer: Writer::open(brokers)?, topic: topic.to_owned(), written: 0 })
    }

    pub fn write(&mut self, message: &Message, error: &DecodeError) -> Result<(), Failure> {
        let (partition, offset, text) = (message.partition.to_string(), message.offset.to_string(), error.to_string());
        let headers = [
            ("source_topic", message.topic.as_str()),
            ("source_partition", partition.as_str()),
            ("source_offset", offset.as_str()),
            ("reason", error.reason()),
            ("error", text.as_str()),
            ("version", env!("CARGO_PKG_VERSION")),
        ];
        let to = Destination { topic: &self.topic, partition: 0 };
        self.writer.send(to, &message.key, &message.payload, &headers, |_| {})?;
        self.written += 1;
        Ok(())
    }

    /// Waits until the broker has them: only then may their offsets be committed.
    pub fn flush(&self) -> Result<(), Failure> {
        self.writer.flush(PATIENCE)
    }
}
