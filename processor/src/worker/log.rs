//! What a worker needs of a log: how far it reaches, a way to append, and to know what has been acknowledged.
//!
//! Kafka in production (`detect/consumer.rs`), [`super::memory`] in simulation. Reading is the driver's: it hands the
//! worker record by record.

use gpufleet_runtime::exit::Failure;
use gpufleet_schemas::record::Incident;

/// Where an output goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stream {
    Incidents,
    Partials,
}

/// An incident that is in its topic already.
#[derive(Clone, Debug, PartialEq)]
pub struct Said {
    pub partition: i32,
    pub incident: Incident,
    /// Hash of the record's bytes.
    pub hash: u64,
}

pub trait Log {
    /// First and next offset of a partition of the input.
    fn bounds(&mut self, partition: i32) -> Result<(i64, i64), Failure>;

    /// Partition count of an output.
    fn partitions(&self, stream: Stream) -> i32;

    /// The incidents of a task that are in the topic.
    fn said(&mut self, task: &str) -> Result<Vec<Said>, Failure>;

    /// Appends a record; no payload is a tombstone. It is acknowledged later.
    fn append(&mut self, stream: Stream, partition: i32, key: &[u8], payload: Option<&[u8]>) -> Result<(), Failure>;

    /// So many appends, counted from the first, are acknowledged with all before them.
    fn acknowledged(&mut self) -> Result<u64, Failure>;

    /// Waits until every append is acknowledged.
    fn flush(&mut self) -> Result<(), Failure>;

    /// Tells the group how far a partition is safe: for display, and for nothing else.
    fn commit(&mut self, partition: i32, next_offset: i64) -> Result<(), Failure>;
}
