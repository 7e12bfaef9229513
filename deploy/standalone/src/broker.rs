//! The embedded broker: librdkafka's mock cluster, in this process, in memory, on loopback.
//!
//! It keeps 5 MiB a partition and drops the oldest beyond that, so a source must wait for its slowest reader; readers
//! fail loudly when the start of the log has overtaken them. No transactions, no retention settings, no security.

use gpufleet_runtime::exit::Failure;
use gpufleet_runtime::topics::{DLQ_PARTITIONS, INCIDENT_PARTITIONS};
use gpufleet_schemas::Topics;
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;

/// A broker that lives as long as this value.
pub struct EmbeddedBroker {
    cluster: MockCluster<'static, DefaultProducerContext>,
}

impl EmbeddedBroker {
    /// Starts it on a free loopback port and creates the topics.
    pub fn start(topics: &Topics, partitions: i32, partials: i32) -> Result<EmbeddedBroker, Failure> {
        let failed = |error| Failure::external(format!("the embedded broker does not start: {error}"));
        let cluster = MockCluster::new(1).map_err(failed)?;
        let counts = [
            (&topics.telemetry, partitions),
            (&topics.partials, partials),
            (&topics.incidents, INCIDENT_PARTITIONS),
            (&topics.dead_letters, DLQ_PARTITIONS),
        ];
        for (topic, count) in counts {
            cluster.create_topic(topic, count, 1).map_err(failed)?;
        }
        Ok(EmbeddedBroker { cluster })
    }

    pub fn bootstrap(&self) -> String {
        self.cluster.bootstrap_servers()
    }
}
