//! Detection: the pure task that turns one partition's records into incidents, its detectors (a file each), and the
//! loop that feeds it from Kafka.

pub mod config;
pub mod consumer;
pub mod coverage_gap;
mod detector;
pub mod ecc_rate;
pub mod ecc_uncorrectable;
pub mod feed_over_rating;
pub mod group_task;
pub mod partials;
pub mod precedence;
pub mod sink;
pub mod task;
pub mod thermal_throttle;
pub mod xid;

pub use config::DetectorsConfig;
pub use detector::{Detector, Source};
pub use group_task::GroupTask;
pub use task::Task;

#[cfg(test)]
mod tests;
