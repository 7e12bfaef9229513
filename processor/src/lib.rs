//! The processor: the log to incidents ([`detect`]) and the log to Parquet ([`archive`]).
//!
//! [`engine`] and the detectors are pure: they read no clock, draw no random number and do no I/O, so they cannot fail
//! and a replay gives the same bytes (laws L1 and L2). Bytes come in and go out in `consumer.rs` and `sink.rs`.

pub mod archive;
pub mod detect;
pub mod engine;
pub mod replay;
pub mod worker;
