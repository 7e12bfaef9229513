//! Deliberate mistakes, to prove that the tests would notice them: a task, or a log, that is wrong in one way.
//!
//! They wrap what production uses, so that production has no switch for them.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

use gpufleet_processor::engine::book::{Pages, TaskId};
use gpufleet_processor::engine::{Input, Machine, Output, Section, StateError};
use gpufleet_processor::worker::log::{Log, Said, Stream};
use gpufleet_runtime::exit::Failure;
use gpufleet_schemas::record::Incident;

/// One mistake each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// A snapshot is stored before its outputs are acknowledged.
    SnapshotBeforeAcknowledgement,
    /// What is out is sent again.
    NoSuppression,
    /// Everything counts as out while a task catches up.
    SuppressEverything,
    /// A record is left out after a restart.
    ReplayOffByOne,
    /// A restart numbers outputs from 0 again.
    LostEmitSeq,
    /// The book is not in the snapshot.
    LostBook,
    /// The group is told of an offset before its snapshot is stored.
    CommitBeforeSnapshot,
    /// An incident's time is read from the wall clock.
    WallClock,
    /// Incidents of one step come in the order of a hash map.
    HashOrder,
    /// A restart sends nothing to stage 2 until it is past what it had sent.
    SilentToGroups,
}

impl Sabotage {
    /// Each mistake, with the invariant that must notice it.
    pub const ALL: [(Sabotage, &'static str); 10] = [
        (Sabotage::SnapshotBeforeAcknowledgement, "I3"),
        (Sabotage::NoSuppression, "once"),
        (Sabotage::SuppressEverything, "I1"),
        (Sabotage::ReplayOffByOne, "I3"),
        (Sabotage::LostEmitSeq, "I1"),
        (Sabotage::LostBook, "I1"),
        (Sabotage::CommitBeforeSnapshot, "I5"),
        (Sabotage::WallClock, "I1"),
        (Sabotage::HashOrder, "I1"),
        (Sabotage::SilentToGroups, "I3"),
    ];
}

/// A task with a mistake.
pub struct Broken<M> {
    inner: M,
    sabotage: Option<Sabotage>,
    /// Restored and not fed yet; then the first number that came out.
    restored: bool,
    first: Option<i64>,
    silent_for: u32,
}

impl<M> Broken<M> {
    pub fn new(inner: M, sabotage: Option<Sabotage>) -> Broken<M> {
        Broken { inner, sabotage, restored: false, first: None, silent_for: 0 }
    }
}

impl<M: Machine> Broken<M> {
    fn spoil(&mut self, outputs: &mut Vec<Output>) {
        match self.sabotage {
            Some(Sabotage::LostEmitSeq) if self.restored => {
                for output in outputs {
                    if let Output::Incident(incident) = output {
                        let first = *self.first.get_or_insert(incident.emit_seq);
                        incident.emit_seq -= first;
                    }
                }
            }
            Some(Sabotage::WallClock) => {
                for output in outputs {
                    if let Output::Incident(incident) = output {
                        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
                        incident.decided_at += i64::from(now.map_or(1, |now| now.subsec_nanos()) % 1000 + 1);
                    }
                }
            }
            Some(Sabotage::HashOrder) => {
                let numbers: Vec<i64> = outputs
                    .iter()
                    .filter_map(|output| match output {
                        Output::Incident(incident) => Some(incident.emit_seq),
                        _ => None,
                    })
                    .collect();
                let state = RandomState::new();
                let mut order: HashMap<i64, u64> = HashMap::new();
                order.extend(numbers.iter().map(|number| (*number, state.hash_one(number))));
                let mut shuffled = numbers.clone();
                shuffled.sort_by_key(|number| order.get(number).copied());
                let mut shuffled = shuffled.into_iter();
                for output in outputs {
                    if let Output::Incident(incident) = output {
                        incident.emit_seq = shuffled.next().expect("as many as before");
                    }
                }
            }
            Some(Sabotage::SilentToGroups) if self.silent_for > 0 => {
                self.silent_for -= 1;
                outputs.retain(|output| matches!(output, Output::Incident(_)));
            }
            _ => {}
        }
    }
}

impl<M: Machine> Machine for Broken<M> {
    fn id(&self) -> &TaskId {
        self.inner.id()
    }

    fn step(&mut self, input: Input<'_>, outputs: &mut Vec<Output>) {
        let mut made = Vec::new();
        self.inner.step(input, &mut made);
        self.spoil(&mut made);
        outputs.append(&mut made);
    }

    fn gap(&mut self, from: i64, to: i64) {
        self.inner.gap(from, to);
    }

    fn save(&self) -> Vec<Section> {
        let mut sections = self.inner.save();
        if self.sabotage == Some(Sabotage::LostBook) {
            for section in sections.iter_mut().filter(|section| section.name == "book") {
                *section = Section::of("book", section.format, &Pages::default());
            }
        }
        sections
    }

    fn load(&mut self, sections: &[Section]) -> Result<(), StateError> {
        (self.restored, self.silent_for) = (true, 200);
        self.inner.load(sections)
    }

    fn take_over(&mut self, sections: &[Section]) -> Result<(), StateError> {
        self.inner.take_over(sections)
    }

    fn start_anew(&mut self, said: Vec<Incident>) {
        self.inner.start_anew(said);
    }
}

/// A log with a mistake.
pub struct BrokenLog<L> {
    pub inner: L,
    sabotage: Option<Sabotage>,
    appended: u64,
}

impl<L> BrokenLog<L> {
    pub fn new(inner: L, sabotage: Option<Sabotage>) -> BrokenLog<L> {
        BrokenLog { inner, sabotage, appended: 0 }
    }
}

impl<L: Log> Log for BrokenLog<L> {
    fn bounds(&mut self, partition: i32) -> Result<(i64, i64), Failure> {
        let bounds = self.inner.bounds(partition)?;
        if self.sabotage == Some(Sabotage::CommitBeforeSnapshot) {
            self.inner.commit(partition, bounds.1)?;
        }
        Ok(bounds)
    }

    fn partitions(&self, stream: Stream) -> i32 {
        self.inner.partitions(stream)
    }

    fn said(&mut self, task: &str) -> Result<Vec<Said>, Failure> {
        let mut said = self.inner.said(task)?;
        match self.sabotage {
            Some(Sabotage::NoSuppression) => said.clear(),
            // Somebody takes "a little more than is out" for out.
            Some(Sabotage::SuppressEverything) => said.iter_mut().for_each(|said| {
                said.incident.emit_seq += 1_000_000;
            }),
            _ => {}
        }
        Ok(said)
    }

    fn append(&mut self, stream: Stream, partition: i32, key: &[u8], payload: Option<&[u8]>) -> Result<(), Failure> {
        self.appended += 1;
        self.inner.append(stream, partition, key, payload)
    }

    fn acknowledged(&mut self) -> Result<u64, Failure> {
        if self.sabotage == Some(Sabotage::SnapshotBeforeAcknowledgement) {
            return Ok(self.appended);
        }
        self.inner.acknowledged()
    }

    fn flush(&mut self) -> Result<(), Failure> {
        self.inner.flush()
    }

    fn commit(&mut self, partition: i32, next_offset: i64) -> Result<(), Failure> {
        self.inner.commit(partition, next_offset)
    }
}
