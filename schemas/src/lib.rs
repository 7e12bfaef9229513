//! The contract: what the records are, how they look on the wire, and what the tables of the lake hold.
//!
//! Takes nothing and gives types, codecs and definitions to every other room. It does no I/O, reads no clock and
//! knows neither Kafka nor Delta.

pub mod catalogue;
pub mod compatibility;
pub mod instant;
pub mod metric;
pub mod partition;
pub mod record;
pub mod table;
pub mod wire;

/// Names of the topics. The first two carry what hosts publish and what detection decides.
pub mod topic {
    pub const TELEMETRY: &str = "gpu.telemetry";
    pub const INCIDENTS: &str = "incidents";
    /// Undecodable records of the telemetry topic, untouched, with where they came from as headers.
    pub const TELEMETRY_DLQ: &str = "gpu.telemetry.dlq";
}
