//! What the integration tests stand on.

pub mod kafka;
