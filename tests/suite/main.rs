//! The integration tests, one binary: linking DataFusion and librdkafka is the daily cost.

mod bad_records;
mod cluster;
mod exactly_once;
mod files;
mod readers;
