//! What a detector is: a pure function of the facts it is shown, in log order.

use gpufleet_schemas::record::{GpuBatch, GpuBlock, XidEvent};

use crate::engine::{Entities, Entity, Finding, GpuId};

/// Which record a fact came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    pub offset: i64,
    /// The record's number within its host and boot.
    pub seq: i64,
}

/// A rule that looks for one kind of incident. It owns its state, reads no clock, and speaks when time advances.
pub trait Detector: Send {
    /// One GPU's part of a batch.
    fn block(&mut self, _gpu: GpuId, _batch: &GpuBatch, _block: &GpuBlock, _source: Source) {}

    /// A host's volatile counters were zeroed, by a boot, a driver load or a reset, before `at`.
    fn reset(&mut self, _host: &str, _at: i64, _source: Source) {}

    /// An event; `entity` is the GPU or the host that it concerns.
    fn event(&mut self, _event: &XidEvent, _entity: &Entity, _source: Source) {}

    /// Event time has come to `now`; what lies at or before `floor` is final. Adds what may be new.
    fn advance(&mut self, now: i64, floor: i64, entities: &Entities, findings: &mut Vec<Finding>);

    /// Facts that came too late to count.
    fn too_late(&self) -> u64 {
        0
    }
}
