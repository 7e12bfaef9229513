//! The worker: runs tasks over the partitions that it owns, so that every output is out exactly once to the eye.
//!
//! A task is a pure function ([`Machine`]); the worker gives it what it cannot have: a place in the log, a way out, and a
//! memory. On assignment it takes the newest valid snapshot and feeds the records since, keeping silent about what is
//! out already. Every so often it snapshots, always in this order: outputs acknowledged, then the snapshot stored, then
//! the group told. One path for production and simulation: [`Log`] is Kafka in one and memory in the other.

pub mod log;
pub mod memory;
mod shelf;
pub mod snapshot;
pub mod store;

use std::collections::BTreeMap;
use std::time::Duration;

use gpufleet_runtime::exit::Failure;
use gpufleet_runtime::failpoint;
use gpufleet_schemas::partition::partition_of;
use gpufleet_schemas::record::{Incident, Upstream};
use gpufleet_schemas::wire::Encoder;

use crate::engine::book::TaskId;
use crate::engine::{Input, Machine, Output};
use log::{Log, Said, Stream};
pub use shelf::Shelf;
use shelf::{Job, Stored};
use snapshot::{Snapshot, hash_of};
use store::{Name, Put};

/// How a worker works.
#[derive(Clone, Debug)]
pub struct Options {
    /// Version of the rules: of the code and the configuration.
    pub version: String,
    pub snapshot_every: Duration,
}

/// What a worker did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub records: u64,
    pub incidents_sent: u64,
    /// Were out already.
    pub incidents_suppressed: u64,
    pub snapshots: u64,
    /// Snapshots that could not be stored, or were damaged.
    pub snapshots_failed: u64,
    /// Outputs or snapshots that stand there with other bytes under the same name. Anything but 0 is an error in the
    /// rules: please report it.
    pub contradictions: u64,
}

impl std::ops::AddAssign for Report {
    fn add_assign(&mut self, other: Report) {
        self.records += other.records;
        self.incidents_sent += other.incidents_sent;
        self.incidents_suppressed += other.incidents_suppressed;
        self.snapshots += other.snapshots;
        self.snapshots_failed += other.snapshots_failed;
        self.contradictions += other.contradictions;
    }
}

/// What is out of a task in one partition of the incidents topic.
#[derive(Default)]
struct Out {
    highest: i64,
    hashes: BTreeMap<i64, u64>,
}

struct Pending {
    next_offset: i64,
    bytes: Vec<u8>,
    /// Stored once so many appends are acknowledged.
    after: u64,
}

struct Shard<M> {
    machine: M,
    next_offset: i64,
    last: Last,
    /// The record before the snapshot, which must still be the same.
    verify: Option<(i64, u64)>,
    out: BTreeMap<i32, Out>,
    /// The next snapshot, that waits for its outputs' acknowledgement.
    pending: Option<Pending>,
    storing: bool,
    snapshot_at: i64,
    due: Duration,
}

/// The record before `next_offset`: by its hash as a snapshot has it, or by its bytes, since hashing each would cost more
/// than detection.
enum Last {
    Hash(Option<u64>),
    Bytes(Vec<u8>),
}

impl Last {
    fn hash(&self) -> Option<u64> {
        match self {
            Last::Hash(hash) => *hash,
            Last::Bytes(payload) => Some(hash_of(payload)),
        }
    }

    fn set(&mut self, payload: &[u8]) {
        match self {
            Last::Bytes(bytes) => {
                bytes.clear();
                bytes.extend_from_slice(payload);
            }
            Last::Hash(_) => *self = Last::Bytes(payload.to_vec()),
        }
    }
}

/// Runs the tasks of the partitions that it is given.
pub struct Worker<M, L> {
    options: Options,
    make: Box<dyn Fn(i32) -> M + Send>,
    pub log: L,
    shelf: Shelf,
    shards: BTreeMap<i32, Shard<M>>,
    appended: u64,
    encoder: Encoder,
    buffer: Vec<u8>,
    outputs: Vec<Output>,
    observe: Box<dyn FnMut(&Incident) + Send>,
    /// The broker did not take what was left.
    gave_up: bool,
    pub report: Report,
}

impl<M: Machine, L: Log> Worker<M, L> {
    pub fn new(
        options: Options,
        log: L,
        shelf: Shelf,
        make: impl Fn(i32) -> M + Send + 'static,
        observe: impl FnMut(&Incident) + Send + 'static,
    ) -> Worker<M, L> {
        Worker {
            options,
            make: Box::new(make),
            log,
            shelf,
            shards: BTreeMap::new(),
            appended: 0,
            encoder: Encoder::default(),
            buffer: Vec::new(),
            outputs: Vec::new(),
            observe: Box::new(observe),
            gave_up: false,
            report: Report::default(),
        }
    }

    /// Takes a partition; gives the offset to read from.
    pub fn assigned(&mut self, partition: i32, now: Duration) -> Result<i64, Failure> {
        let mut machine = (self.make)(partition);
        let task = machine.id().clone();
        let (low, high) = self.log.bounds(partition)?;
        let said = self.log.said(&task.to_string())?;
        let found = self.newest(&task)?;
        let (mut next_offset, mut last_record) = (0, None);
        if let Some(snapshot) = &found {
            if snapshot.next_offset > high {
                return Err(recreated(&task, snapshot.next_offset, high));
            }
            machine = self.restore(machine, partition, snapshot, &said)?;
            (next_offset, last_record) = (snapshot.next_offset, snapshot.last_record);
        }
        let said_before: Vec<Incident> = said.iter().map(|said| said.incident.clone()).collect();
        let mut out: BTreeMap<i32, Out> = BTreeMap::new();
        for said in said {
            let out = out.entry(said.partition).or_insert(Out { highest: i64::MIN, hashes: BTreeMap::new() });
            out.highest = out.highest.max(said.incident.emit_seq);
            out.hashes.insert(said.incident.emit_seq, said.hash);
        }
        let mut shard = Shard {
            machine,
            next_offset,
            last: Last::Hash(last_record),
            verify: None,
            out,
            pending: None,
            storing: false,
            snapshot_at: next_offset,
            // Spread out, so that not all partitions come at once.
            due: now + self.options.snapshot_every.mul_f64(f64::from(partition % 16 + 1) / 16.0),
        };
        let mut start = next_offset;
        if low > next_offset {
            tracing::warn!(task = %task, from = next_offset, to = low, "the log has lost records that were never looked at");
            shard.machine.gap(next_offset, low);
            (shard.next_offset, shard.last, start) = (low, Last::Hash(None), low);
            // What is out does not follow from this state: the records between are gone. The first snapshot fixes what it
            // knows of them, and whoever comes second takes that one.
            shard.machine.start_anew(said_before);
            let fixed = pending(&shard, &self.options, 0);
            let name = Name { next_offset: low, version: self.options.version.clone() };
            if self.shelf.store.put(&task, &name, &fixed.bytes)? == Put::Differs
                && let Some(Ok(first)) = self.shelf.store.get(&task, &name)?.map(|bytes| Snapshot::decode(&bytes))
            {
                shard.machine = (self.make)(partition);
                load(&mut shard.machine, &first)?;
            }
            shard.snapshot_at = low;
            shard.out.clear();
        } else if let Some(hash) = last_record.filter(|_| next_offset > low) {
            start = next_offset - 1;
            shard.verify = Some((start, hash));
        }
        self.shards.insert(partition, shard);
        Ok(start)
    }

    /// The newest snapshot that can be read, of any version.
    fn newest(&mut self, task: &TaskId) -> Result<Option<Snapshot>, Failure> {
        for name in self.shelf.store.list(task)?.into_iter().rev() {
            let Some(bytes) = self.shelf.store.get(task, &name)? else { continue };
            match Snapshot::decode(&bytes) {
                Ok(snapshot) if snapshot.task == task.to_string() => return Ok(Some(snapshot)),
                Ok(snapshot) => tracing::error!(task = %task, of = snapshot.task, "a snapshot is of another task"),
                Err(problem) => {
                    self.report.snapshots_failed += 1;
                    tracing::error!(task = %task, offset = name.next_offset, problem, "a snapshot is damaged; an older one is used");
                }
            }
        }
        Ok(None)
    }

    fn restore(&self, mut machine: M, partition: i32, snapshot: &Snapshot, said: &[Said]) -> Result<M, Failure> {
        if snapshot.version == self.options.version {
            load(&mut machine, snapshot)?;
            return Ok(machine);
        }
        tracing::info!(
            task = snapshot.task,
            from = snapshot.version,
            to = self.options.version,
            offset = snapshot.next_offset,
            "taking over from another version of the rules"
        );
        let said = said.iter().map(|said| said.incident.clone()).collect();
        machine.take_over(&snapshot.sections).map_err(|error| {
            Failure::config(format!(
                "the state that version {} of the rules left for {} cannot be taken over ({error}); start that version, or \
                 give another --snapshots folder and so start afresh",
                snapshot.version, snapshot.task
            ))
        })?;
        machine.start_anew(said);
        // What the other version had said by now is no part of the log: the first snapshot of this version fixes it, and
        // whoever comes second takes that one.
        let ours = Snapshot { version: self.options.version.clone(), sections: machine.save(), ..snapshot.clone() };
        let name = Name { next_offset: ours.next_offset, version: ours.version.clone() };
        let task = machine.id().clone();
        if self.shelf.store.put(&task, &name, &ours.encode())? == Put::Differs
            && let Some(Ok(first)) = self.shelf.store.get(&task, &name)?.map(|bytes| Snapshot::decode(&bytes))
        {
            machine = (self.make)(partition);
            load(&mut machine, &first)?;
        }
        Ok(machine)
    }

    /// Takes the next record of a partition.
    pub fn record(&mut self, partition: i32, input: Input<'_>) -> Result<(), Failure> {
        let Some(shard) = self.shards.get_mut(&partition) else { return Ok(()) };
        if let Some((offset, hash)) = shard.verify {
            if input.offset == offset && hash_of(input.payload) != hash {
                return Err(recreated(shard.machine.id(), offset + 1, offset + 1));
            }
            shard.verify = None;
        }
        if input.offset < shard.next_offset {
            return Ok(());
        }
        shard.machine.step(input, &mut self.outputs);
        shard.next_offset = input.offset + 1;
        shard.last.set(input.payload);
        self.report.records += 1;
        self.send(partition)
    }

    /// Sends what the task of `partition` has made.
    fn send(&mut self, partition: i32) -> Result<(), Failure> {
        let mut outputs = std::mem::take(&mut self.outputs);
        for output in outputs.drain(..) {
            match output {
                Output::Incident(incident) => self.send_incident(partition, &incident)?,
                Output::Tombstone { id } => {
                    let to = partition_of(&id, self.log.partitions(Stream::Incidents));
                    self.append(Stream::Incidents, to, id.as_bytes(), false)?;
                }
                Output::Group { key, record } => {
                    let to = partition_of(&key, self.log.partitions(Stream::Partials));
                    self.send_upstream(to, key.as_bytes(), &record)?;
                }
                Output::Everyone(record) => {
                    self.encoder.upstream(&record, &mut self.buffer);
                    for to in 0..self.log.partitions(Stream::Partials) {
                        self.append(Stream::Partials, to, b"everyone", true)?;
                    }
                }
                Output::Itself(record) => self.send_upstream(partition, b"itself", &record)?,
            }
        }
        self.outputs = outputs;
        Ok(())
    }

    fn send_upstream(&mut self, to: i32, key: &[u8], record: &Upstream) -> Result<(), Failure> {
        self.encoder.upstream(record, &mut self.buffer);
        self.append(Stream::Partials, to, key, true)
    }

    fn append(&mut self, stream: Stream, to: i32, key: &[u8], payload: bool) -> Result<(), Failure> {
        self.log.append(stream, to, key, payload.then_some(&self.buffer[..]))?;
        self.appended += 1;
        Ok(())
    }

    fn send_incident(&mut self, partition: i32, incident: &Incident) -> Result<(), Failure> {
        let to = partition_of(&incident.id, self.log.partitions(Stream::Incidents));
        self.encoder.incident(incident, &mut self.buffer);
        let out = self.shards.get(&partition).and_then(|shard| shard.out.get(&to));
        if let Some(out) = out.filter(|out| incident.emit_seq <= out.highest) {
            let hash = out.hashes.get(&incident.emit_seq);
            if hash.is_some_and(|hash| *hash != hash_of(&self.buffer)) {
                self.report.contradictions += 1;
                tracing::error!(
                    task = incident.task,
                    emit_seq = incident.emit_seq,
                    id = incident.id,
                    "a replay contradicts what is out: the rules are not deterministic; please report this"
                );
            }
            self.report.incidents_suppressed += 1;
            return Ok(());
        }
        self.append(Stream::Incidents, to, incident.id.as_bytes(), true)?;
        failpoint::reached("detect.before_acknowledgement");
        self.report.incidents_sent += 1;
        (self.observe)(incident);
        Ok(())
    }

    /// Snapshots what is due. `now` is any clock that does not go back.
    pub fn keep(&mut self, now: Duration) -> Result<(), Failure> {
        while let Some(stored) = self.shelf.stored() {
            self.stored(stored)?;
        }
        let acknowledged = self.log.acknowledged()?;
        let partitions: Vec<i32> = self.shards.keys().copied().collect();
        for partition in partitions {
            let Some(shard) = self.shards.get_mut(&partition) else { continue };
            if shard.pending.is_none() && !shard.storing && now >= shard.due && shard.next_offset > shard.snapshot_at {
                shard.pending = Some(pending(shard, &self.options, self.appended));
                shard.due = now + self.options.snapshot_every;
                failpoint::reached("detect.snapshot_taken");
            }
            if let Some(ready) = shard.pending.take_if(|pending| pending.after <= acknowledged) {
                failpoint::reached("detect.before_snapshot");
                let name = Name { next_offset: ready.next_offset, version: self.options.version.clone() };
                let job = Job { partition, task: shard.machine.id().clone(), name, bytes: ready.bytes };
                match self.shelf.put(job)? {
                    None => shard.storing = true,
                    // The store is behind: this one waits for its turn.
                    Some(Job { bytes, .. }) => {
                        shard.pending = Some(Pending { bytes, next_offset: ready.next_offset, after: ready.after });
                    }
                }
            }
        }
        while let Some(stored) = self.shelf.stored() {
            self.stored(stored)?;
        }
        Ok(())
    }

    fn stored(&mut self, Stored { partition, next_offset, put }: Stored) -> Result<(), Failure> {
        failpoint::reached("detect.after_snapshot");
        let shard = self.shards.get_mut(&partition);
        match put {
            Ok(put) => {
                self.report.snapshots += 1;
                if put == Put::Differs {
                    self.report.contradictions += 1;
                    tracing::error!(
                        partition,
                        next_offset,
                        "another owner stored other bytes as this snapshot: the rules are not deterministic; please report this"
                    );
                }
                let Some(shard) = shard else { return Ok(()) };
                shard.storing = false;
                shard.snapshot_at = shard.snapshot_at.max(next_offset);
                self.log.commit(partition, next_offset)
            }
            // Snapshots lag, detection goes on.
            Err(error) => {
                self.report.snapshots_failed += 1;
                tracing::warn!(partition, next_offset, %error, "a snapshot was not stored; the next one will be");
                if let Some(shard) = shard {
                    shard.storing = false;
                }
                Ok(())
            }
        }
    }

    /// Gives a partition up in good order: the next owner finds a snapshot of everything.
    pub fn revoked(&mut self, partition: i32) -> Result<(), Failure> {
        let Some(shard) = self.shards.remove(&partition) else { return Ok(()) };
        if self.gave_up {
            return Ok(());
        }
        // Without a broker there is no good order: the next owner replays a little more.
        self.gave_up = true;
        self.log.flush()?;
        self.gave_up = false;
        if shard.next_offset > shard.snapshot_at && shard.verify.is_none() {
            let pending = pending(&shard, &self.options, self.appended);
            let name = Name { next_offset: pending.next_offset, version: self.options.version.clone() };
            let put = self.shelf.store.put(shard.machine.id(), &name, &pending.bytes);
            let committed = put.is_ok();
            self.stored(Stored { partition, next_offset: pending.next_offset, put })?;
            if committed {
                self.log.commit(partition, pending.next_offset)?;
            }
        }
        Ok(())
    }

    /// Drops a partition that somebody else owns already.
    pub fn lost(&mut self, partition: i32) {
        self.shards.remove(&partition);
    }

    /// Gives everything up in good order.
    pub fn finish(&mut self) -> Result<(), Failure> {
        let mut result = Ok(());
        for partition in self.owned() {
            result = result.and(self.revoked(partition));
        }
        result
    }

    pub fn owned(&self) -> Vec<i32> {
        self.shards.keys().copied().collect()
    }

    pub fn machines(&self) -> impl Iterator<Item = &M> {
        self.shards.values().map(|shard| &shard.machine)
    }

    /// The next offset of a partition.
    pub fn next_offset(&self, partition: i32) -> Option<i64> {
        self.shards.get(&partition).map(|shard| shard.next_offset)
    }
}

fn load<M: Machine>(machine: &mut M, snapshot: &Snapshot) -> Result<(), Failure> {
    machine.load(&snapshot.sections).map_err(|error| {
        Failure::bug(format!("the snapshot of {} at offset {}: {error}", snapshot.task, snapshot.next_offset))
    })
}

fn pending<M: Machine>(shard: &Shard<M>, options: &Options, appended: u64) -> Pending {
    let snapshot = Snapshot {
        task: shard.machine.id().to_string(),
        version: options.version.clone(),
        next_offset: shard.next_offset,
        last_record: shard.last.hash(),
        sections: shard.machine.save(),
    };
    Pending { next_offset: shard.next_offset, bytes: snapshot.encode(), after: appended }
}

fn recreated(task: &TaskId, next_offset: i64, high: i64) -> Failure {
    Failure::config(format!(
        "{} partition {} is not the log that detection has read up to offset {next_offset} (it now reaches to {high}): the \
         topic was deleted and made anew, or cut; give another --snapshots folder to start afresh with this log",
        task.topic, task.partition
    ))
}
