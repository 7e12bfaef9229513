//! The integration tests, one binary: linking DataFusion and librdkafka is the daily cost.
