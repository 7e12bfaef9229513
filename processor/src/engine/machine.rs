//! What a task is: a pure function from the records of one partition, in offset order, to numbered outputs.
//!
//! [`Machine`] is what the worker runs, in production and in simulation alike: it feeds records, sends outputs, and keeps
//! the state that [`Machine::save`] gives. A state is a list of named sections, so that another version of the detectors
//! can take over those that it understands.

use gpufleet_schemas::record::{Incident, Upstream};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::book::TaskId;

/// One record of a partition, as the log gives it.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    pub offset: i64,
    /// When the broker took it, microseconds; none where the log does not say.
    pub appended_at: Option<i64>,
    pub payload: &'a [u8],
}

/// What a task gives.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    Incident(Box<Incident>),
    /// The incident has long been over: the compacted topic may forget it.
    Tombstone {
        id: String,
    },
    /// To the partition of a group.
    Group {
        key: String,
        record: Upstream,
    },
    /// To every partition of the partials topic.
    Everyone(Upstream),
    /// To the partition of the partials topic that this task reads itself.
    Itself(Upstream),
}

/// A part of a task's state, readable by every version that knows its format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Section {
    pub name: String,
    pub format: u32,
    pub bytes: Vec<u8>,
}

/// Why a state cannot be loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("section {name} of the state cannot be read: {problem}")]
pub struct StateError {
    pub name: String,
    pub problem: String,
}

impl Section {
    pub fn of<T: Serialize>(name: &str, format: u32, state: &T) -> Section {
        // Our states are trees of integers, texts and maps, which postcard always takes.
        Section { name: name.to_owned(), format, bytes: postcard::to_allocvec(state).unwrap_or_default() }
    }

    pub fn read<T: DeserializeOwned>(&self, format: u32) -> Result<T, StateError> {
        let failed = |problem: String| StateError { name: self.name.clone(), problem };
        if self.format != format {
            return Err(failed(format!("it has format {} and this version reads {format}", self.format)));
        }
        postcard::from_bytes(&self.bytes).map_err(|error| failed(error.to_string()))
    }
}

/// Finds a section by its name.
pub fn section<'s>(sections: &'s [Section], name: &str) -> Result<&'s Section, StateError> {
    let missing = || StateError { name: name.to_owned(), problem: "it is missing".to_owned() };
    sections.iter().find(|section| section.name == name).ok_or_else(missing)
}

/// Outputs of one version of the rules are numbered within a block of so many numbers.
const NUMBERS: i64 = 1 << 40;

/// Where a version that takes over starts to number: above everything that the one before may have sent.
pub fn numbers_of_next_version(emit_seq: i64, said: &[Incident]) -> i64 {
    let newest = said.iter().map(|incident| incident.emit_seq).fold(emit_seq, i64::max);
    (newest / NUMBERS + 1).saturating_mul(NUMBERS)
}

/// A task. Everything that it does follows from its state and the records it is shown.
pub trait Machine {
    fn id(&self) -> &TaskId;

    /// Takes one record; adds what it makes.
    fn step(&mut self, input: Input<'_>, outputs: &mut Vec<Output>);

    /// The log has lost the records from `from` up to, not including, `to`.
    fn gap(&mut self, from: i64, to: i64);

    fn save(&self) -> Vec<Section>;

    /// Takes the state of the same version of the same rules.
    fn load(&mut self, sections: &[Section]) -> Result<(), StateError>;

    /// Takes what it understands of the state of another version of the rules.
    fn take_over(&mut self, sections: &[Section]) -> Result<(), StateError>;

    /// Goes on where what is out does not follow from its state: another version has said it, or the log that it came
    /// from is gone. Numbers its outputs from above those, and takes back what it does not find itself.
    fn start_anew(&mut self, said: Vec<Incident>);
}
