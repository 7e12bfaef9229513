//! What a detector is: a pure function of the facts it is shown, in log order.

use gpufleet_schemas::record::{GpuBatch, GpuBlock, XidEvent};

use crate::engine::{Entities, Entity, Finding, GpuId, Section, StateError};

/// Which record a fact came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    pub offset: i64,
    /// The record's number within its host and boot.
    pub seq: i64,
}

/// A rule that looks for one kind of incident. It owns its state, reads no clock, and speaks when time advances.
pub trait Detector: Send {
    /// The kind that it finds: its file, its table in `detectors.toml`, its runbook.
    fn kind(&self) -> &'static str;

    /// One GPU's part of a batch.
    fn block(&mut self, _gpu: GpuId, _batch: &GpuBatch, _block: &GpuBlock, _source: Source) {}

    /// A host's volatile counters were zeroed, by a boot, a driver load or a reset, before `at`; for the `number`-th time.
    /// A record that came late may tell of the same one again, with an earlier instant.
    fn reset(&mut self, _host: &str, _at: i64, _number: u32, _source: Source) {}

    /// An event; `entity` is the GPU or the host that it concerns.
    fn event(&mut self, _event: &XidEvent, _entity: &Entity, _source: Source) {}

    /// A record of the log was looked at; `undecodable` when its bytes were no record.
    fn looked_at(&mut self, _offset: i64, _undecodable: bool) {}

    /// The log has lost the records from `from` up to, not including, `to`.
    fn gap(&mut self, _from: i64, _to: i64) {}

    /// Event time has come to `now`; what lies at or before `floor` is final. Adds what may be new, and says whether
    /// that is all there is: what it found before and no longer adds is then withdrawn.
    fn advance(&mut self, now: i64, floor: i64, entities: &Entities, findings: &mut Vec<Finding>) -> bool;

    /// Facts that came too late to count.
    fn too_late(&self) -> u64 {
        0
    }

    /// The state, as a section of its kind's name.
    fn save(&self) -> Section;

    fn load(&mut self, section: &Section) -> Result<(), StateError>;
}
