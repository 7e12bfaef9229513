//! The integration tests, one binary: linking DataFusion and librdkafka is the daily cost.

mod bad_records;
mod cli;
mod cluster;
mod docs;
mod exactly_once;
mod files;
mod readers;
mod tidy;
