//! What the integration tests stand on.

pub mod kafka;
pub mod lake;
pub mod log;
pub mod programs;
