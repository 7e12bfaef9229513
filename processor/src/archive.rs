//! The archive: the log to the Delta tables of the lake, exactly once.
//!
//! Takes `gpu.telemetry` and `incidents`, gives rows. One commit holds the rows of a flush and, as application
//! transactions, the offset that each partition has come to (law L5). It never rewrites what it has committed.

pub mod commit;
pub mod consumer;
pub mod dead_letters;
pub mod rows;
pub mod seen;
