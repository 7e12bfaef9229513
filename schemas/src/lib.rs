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

/// The topics, as a site names them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topics {
    /// What hosts publish, and ticks.
    pub telemetry: String,
    /// What stage 1 of detection tells stage 2.
    pub partials: String,
    /// What detection decides.
    pub incidents: String,
    /// Undecodable records of the other two, untouched, with where they came from as headers.
    pub dead_letters: String,
}

impl Topics {
    /// The topics behind a prefix, for a cluster that is shared; the empty prefix gives the plain names.
    pub fn with_prefix(prefix: &str) -> Topics {
        Topics {
            telemetry: format!("{prefix}gpu.telemetry"),
            partials: format!("{prefix}fleet.partials"),
            incidents: format!("{prefix}incidents"),
            dead_letters: format!("{prefix}gpu.telemetry.dlq"),
        }
    }
}
