//! The records that everything is measured on: a simulated fleet, made once, the same each time.

use gpufleet_collector::simulator::{FleetOptions, Simulator};
use gpufleet_collector::source::{Source, SourceError};
use gpufleet_schemas::instant::SECOND;
use gpufleet_schemas::record::{GpuBatch, Telemetry};
use gpufleet_schemas::wire::Encoder;

pub const GPUS: usize = 64;
pub const HERTZ: i64 = 10;
pub const SEED: u64 = 1;
/// 2026-03-02T09:00:00Z: no measured span goes past its midnight.
const START_AT: i64 = 1_772_442_000 * SECOND;

/// Records in the order of their time, as one partition would hold them.
pub struct Fleet {
    pub records: Vec<Telemetry>,
    /// The records on the wire, one for one.
    pub payloads: Vec<Vec<u8>>,
    /// (gpu, tick) pairs, that is rows of `gpu_samples`.
    pub samples: usize,
}

impl Fleet {
    /// `seconds` of fleet time.
    pub fn simulate(seconds: i64) -> Result<Fleet, SourceError> {
        let mut source = Simulator::new(FleetOptions {
            seed: SEED,
            gpus: GPUS,
            start_at: START_AT,
            span: seconds * SECOND,
            fast_hertz: HERTZ,
            run: "bench".to_owned(),
        });
        let mut records = Vec::new();
        while let Some(record) = source.next()? {
            records.push(record);
        }
        let encoder = Encoder::default();
        let encode = |record| {
            let mut payload = Vec::new();
            encoder.telemetry(record, &mut payload);
            payload
        };
        let payloads = records.iter().map(encode).collect();
        let mut fleet = Fleet { records, payloads, samples: 0 };
        fleet.samples = fleet.batches().map(GpuBatch::sample_count).sum();
        Ok(fleet)
    }

    /// The sample batches; the other records are a handful of kernel events.
    pub fn batches(&self) -> impl Iterator<Item = &GpuBatch> {
        self.records.iter().filter_map(|record| match record {
            Telemetry::Batch(batch) => Some(batch),
            Telemetry::Event(_) | Telemetry::Tick(_) | Telemetry::Topology(_) => None,
        })
    }
}
