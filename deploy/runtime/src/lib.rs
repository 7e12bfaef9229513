//! The plumbing that every role shares: errors with exit codes, logging, configuration, the Kafka clients, and
//! opening a lake. It knows no metric, no detector and no query.

pub mod config;
pub mod exit;
pub mod failpoint;
pub mod kafka;
pub mod lake;
pub mod logging;
pub mod progress;
pub mod topics;
