//! Detection: the pure task that turns one partition's records into incidents, its detectors (a file each), and the
//! loop that feeds it from Kafka.

pub mod config;
pub mod consumer;
mod detector;
pub mod ecc_rate;
pub mod ecc_uncorrectable;
pub mod sink;
pub mod task;
pub mod thermal_throttle;
pub mod xid;

pub use config::DetectorsConfig;
pub use detector::{Detector, Source};
pub use task::Task;

#[cfg(test)]
mod tests;
