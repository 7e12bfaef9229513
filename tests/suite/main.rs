//! The integration tests, one binary: linking DataFusion and librdkafka is the daily cost.

mod bad_records;
mod cli;
mod cluster;
mod demo;
mod docs;
mod embedded;
mod exactly_once;
mod faults;
mod files;
mod oracle;
mod readers;
mod replay;
mod simulation;
mod targets;
mod tidy;
