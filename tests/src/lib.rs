//! What the integration tests stand on.

pub mod cluster;
pub mod detection;
pub mod kafka;
pub mod lake;
pub mod log;
pub mod oracle;
pub mod programs;
pub mod proxy;
pub mod random_log;
pub mod sabotage;
pub mod simulation;
