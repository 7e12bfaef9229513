//! Detection under faults, in memory: workers that crash, hang, lose partitions and find damaged snapshots, on a log
//! that takes, delays or loses what they send. Everything follows from a seed.
//!
//! The workers and tasks are the ones of production; only the log, the store and the driver are simulated. At the end
//! the invariants of `docs/contributing/testing.md` are checked, and those that do not hold are named.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures::TryStreamExt;
use gpufleet_processor::detect::{DetectorsConfig, GroupTask, Task};
use gpufleet_processor::engine::book::TaskId;
use gpufleet_processor::engine::{Input, Machine, Output};
use gpufleet_processor::worker::log::Stream;
use gpufleet_processor::worker::memory::{Broker, MemoryLog};
use gpufleet_processor::worker::store::Store;
use gpufleet_processor::worker::{Options, Shelf, Worker};
use gpufleet_schemas::record::Upstream;
use gpufleet_schemas::wire::{Decoder, Encoder};
use object_store::memory::InMemory;
use object_store::{ObjectStore, ObjectStoreExt};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::random_log::{Shape, random_log};
use crate::sabotage::{Broken, BrokenLog, Sabotage};

const PARTITIONS: i32 = 4;
const PARTIALS: i32 = 2;
const INCIDENTS: i32 = 3;
const TELEMETRY: &str = "gpu.telemetry";
const PARTIALS_TOPIC: &str = "fleet.partials";
/// What a worker takes in one turn.
const TURN: usize = 400;

/// The invariant that did not hold, and what was seen.
pub type Broke = (&'static str, String);

/// What a run went through.
#[derive(Clone, Copy, Debug, Default)]
pub struct Trials {
    pub incidents: usize,
    pub crashes: u32,
    pub moves: u32,
    pub zombies: u32,
    pub damaged: u32,
    pub suppressed: u64,
}

fn id(topic: &str, partition: i32) -> TaskId {
    TaskId { log_id: "simulation/log".into(), topic: topic.to_owned(), partition }
}

/// A stage: its workers, and which of them owns which partition.
struct Stage<M> {
    workers: Vec<Worker<Broken<M>, BrokenLog<MemoryLog>>>,
    owner: Vec<usize>,
    /// Where each (worker, partition) reads on.
    next: BTreeMap<(usize, i32), usize>,
    open: Box<dyn Fn() -> Worker<Broken<M>, BrokenLog<MemoryLog>>>,
    sabotage: Option<Sabotage>,
}

impl<M: Machine> Stage<M> {
    fn start(
        workers: usize,
        partitions: i32,
        sabotage: Option<Sabotage>,
        open: impl Fn() -> Worker<Broken<M>, BrokenLog<MemoryLog>> + 'static,
    ) -> Stage<M> {
        let mut stage = Stage {
            workers: (0..workers).map(|_| open()).collect(),
            owner: (0..partitions as usize).map(|partition| partition % workers).collect(),
            next: BTreeMap::new(),
            open: Box::new(open),
            sabotage,
        };
        for partition in 0..partitions {
            stage.assign(stage.owner[partition as usize], partition, Duration::ZERO);
        }
        stage
    }

    fn assign(&mut self, worker: usize, partition: i32, now: Duration) {
        let start = self.workers[worker].assigned(partition, now).expect("assigned");
        let skips = self.sabotage == Some(Sabotage::ReplayOffByOne) && start > 0;
        self.next.insert((worker, partition), start as usize + usize::from(skips) * 2);
    }

    fn owned(&self, worker: usize) -> Vec<i32> {
        self.workers[worker].owned()
    }

    /// Feeds a worker some records of one of its partitions.
    fn feed(
        &mut self,
        worker: usize,
        partition: i32,
        records: &dyn Fn(i32, usize) -> Option<(i64, Vec<u8>)>,
        count: usize,
    ) {
        for _ in 0..count {
            let Some(next) = self.next.get_mut(&(worker, partition)) else { return };
            let Some((appended_at, payload)) = records(partition, *next) else { return };
            let input = Input { offset: *next as i64, appended_at: Some(appended_at), payload: &payload };
            *next += 1;
            self.workers[worker].record(partition, input).expect("recorded");
        }
    }

    /// A worker dies: of what it had in flight the broker has taken some, and nobody heard.
    fn crash(&mut self, worker: usize, rng: &mut ChaCha8Rng, now: Duration) {
        let mut owned = self.owned(worker);
        owned.retain(|partition| self.owner[*partition as usize] == worker);
        let log = &mut self.workers[worker].log.inner;
        let taken = rng.random_range(0..=log.in_flight());
        log.deliver(taken, false);
        self.workers[worker] = (self.open)();
        self.next.retain(|(of, _), _| *of != worker);
        for partition in owned {
            self.assign(worker, partition, now);
        }
    }

    /// A partition moves in good order.
    fn hand_over(&mut self, partition: i32, to: usize, now: Duration) {
        let from = self.owner[partition as usize];
        if from == to {
            return;
        }
        self.workers[from].revoked(partition).expect("revoked");
        self.next.remove(&(from, partition));
        self.owner[partition as usize] = to;
        self.assign(to, partition, now);
    }

    /// A partition gets a new owner, and the old one does not know.
    fn usurp(&mut self, partition: i32, now: Duration) -> Option<usize> {
        let from = self.owner[partition as usize];
        let to = (from + 1) % self.workers.len();
        if to == from || self.next.contains_key(&(to, partition)) {
            return None;
        }
        self.owner[partition as usize] = to;
        self.assign(to, partition, now);
        Some(from)
    }

    /// The old owner notices.
    fn notice(&mut self, worker: usize, partition: i32) {
        if self.owner[partition as usize] != worker {
            self.workers[worker].lost(partition);
            self.next.remove(&(worker, partition));
        }
    }

    fn all_read(&self, length: impl Fn(i32) -> usize) -> bool {
        (0..self.owner.len()).all(|partition| {
            let key = (self.owner[partition], partition as i32);
            self.next.get(&key).is_some_and(|next| *next >= length(partition as i32))
        })
    }
}

/// Runs a seed, with a deliberate mistake if one is given.
pub fn run(seed: u64, sabotage: Option<Sabotage>) -> Result<Trials, Vec<Broke>> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed ^ 0x7369_6d75);
    let config = DetectorsConfig::default();
    let log = random_log(seed, &Shape { partitions: PARTITIONS, ..Shape::default() });
    let encoder = Encoder::default();
    let mut telemetry: Vec<Vec<(i64, Vec<u8>)>> = vec![Vec::new(); PARTITIONS as usize];
    for (partition, record) in &log.records {
        let mut bytes = Vec::new();
        encoder.telemetry(record, &mut bytes);
        // The broker took it when it was new.
        telemetry[*partition as usize].push((record.newest_at() + 30_000_000, bytes));
    }
    let telemetry = Rc::new(telemetry);
    let oracle = Oracle::of(&telemetry, &config);

    let broker = Rc::new(RefCell::new(Broker::default()));
    let objects = Arc::new(InMemory::new());
    let store = Store::of(objects.clone(), "memory").expect("a store");
    let options = Options { version: "v1".into(), snapshot_every: Duration::from_secs(30) };
    let upstream: Vec<String> = (0..PARTITIONS).map(|partition| id(TELEMETRY, partition).to_string()).collect();

    let mut hosts = {
        let (broker, telemetry, store) = (broker.clone(), telemetry.clone(), store.clone());
        let (options, config) = (options.clone(), config.clone());
        Stage::start(2, PARTITIONS, sabotage, move || {
            let length = {
                let telemetry = telemetry.clone();
                move |partition: i32| telemetry[partition as usize].len() as i64
            };
            let log = MemoryLog::new(broker.clone(), TELEMETRY, length, INCIDENTS, PARTIALS);
            let config = config.clone();
            let make = move |partition| Broken::new(Task::new(id(TELEMETRY, partition), &config), sabotage);
            Worker::new(options.clone(), BrokenLog::new(log, sabotage), Shelf::at_once(store.clone()), make, |_| {})
        })
    };
    let mut groups = {
        let (broker, store) = (broker.clone(), store.clone());
        let (config, upstream) = (config.clone(), upstream.clone());
        Stage::start(2, PARTIALS, sabotage, move || {
            let length = {
                let broker = broker.clone();
                move |partition: i32| broker.borrow().partition(Stream::Partials, partition).len() as i64
            };
            let log = MemoryLog::new(broker.clone(), PARTIALS_TOPIC, length, INCIDENTS, PARTIALS);
            let (config, upstream) = (config.clone(), upstream.clone());
            let make = move |partition| {
                Broken::new(GroupTask::new(id(PARTIALS_TOPIC, partition), upstream.clone(), &config), sabotage)
            };
            Worker::new(options.clone(), BrokenLog::new(log, sabotage), Shelf::at_once(store.clone()), make, |_| {})
        })
    };

    let host_records = {
        let telemetry = telemetry.clone();
        move |partition: i32, at: usize| telemetry[partition as usize].get(at).cloned()
    };
    let group_records = {
        let broker = broker.clone();
        move |partition: i32, at: usize| {
            let broker = broker.borrow();
            let stored = broker.partition(Stream::Partials, partition).get(at)?;
            Some((stored.appended_at, stored.payload.clone().unwrap_or_default()))
        }
    };
    let (mut trials, mut now, mut zombies) = (Trials::default(), Duration::ZERO, Vec::new());
    let host_length = |partition: i32| telemetry[partition as usize].len();
    let group_length = |partition: i32| broker.borrow().partition(Stream::Partials, partition).len();
    for turn in 0..100_000 {
        now += Duration::from_secs(rng.random_range(1..4));
        broker.borrow_mut().now = i64::try_from(now.as_micros()).expect("short");
        take_turn(&mut hosts, &host_records, &mut rng, now);
        take_turn(&mut groups, &group_records, &mut rng, now);
        if turn > 3 && rng.random_bool(0.12) {
            trials.crashes += 1;
            if rng.random_bool(0.7) {
                let worker = rng.random_range(0..2);
                hosts.crash(worker, &mut rng, now);
            } else {
                let worker = rng.random_range(0..2);
                groups.crash(worker, &mut rng, now);
            }
        }
        if rng.random_bool(0.08) {
            trials.moves += 1;
            hosts.hand_over(rng.random_range(0..PARTITIONS), rng.random_range(0..2), now);
            groups.hand_over(rng.random_range(0..PARTIALS), rng.random_range(0..2), now);
        }
        // Half of the seeds know no zombies, so that what is out twice there is an error.
        if seed % 2 == 0 && rng.random_bool(0.05) {
            let partition = rng.random_range(0..PARTITIONS);
            if let Some(old) = hosts.usurp(partition, now) {
                trials.zombies += 1;
                zombies.push((turn + rng.random_range(1..6), old, partition));
            }
        }
        zombies.retain(|(until, worker, partition)| {
            if turn >= *until {
                hosts.notice(*worker, *partition);
            }
            turn < *until
        });
        if rng.random_bool(0.04) {
            trials.damaged += u32::from(damage(&objects, &mut rng));
        }
        commits_are_durable(&broker, &store).map_err(|broke| vec![broke])?;
        if hosts.all_read(host_length) && zombies.is_empty() {
            for worker in 0..2 {
                hosts.workers[worker].log.inner.deliver(usize::MAX, true);
                groups.workers[worker].log.inner.deliver(usize::MAX, true);
            }
            if groups.all_read(group_length) {
                break;
            }
        }
        assert!(turn < 99_999, "seed {seed} does not come to an end");
    }
    for worker in hosts.workers.iter_mut() {
        worker.finish().expect("finishes");
        trials.suppressed += worker.report.incidents_suppressed;
    }
    for worker in groups.workers.iter_mut() {
        worker.finish().expect("finishes");
        trials.suppressed += worker.report.incidents_suppressed;
    }
    commits_are_durable(&broker, &store).map_err(|broke| vec![broke])?;
    trials.incidents = oracle.hosts.len();
    let once = seed % 2 == 1;
    let broker = broker.borrow();
    let checks = [oracle.check(&broker, &upstream, &config, once), oracle.check_partials(&broker)];
    let broke: Vec<Broke> = checks.into_iter().filter_map(Result::err).collect();
    if broke.is_empty() { Ok(trials) } else { Err(broke) }
}

fn take_turn<M: Machine>(
    stage: &mut Stage<M>,
    records: &dyn Fn(i32, usize) -> Option<(i64, Vec<u8>)>,
    rng: &mut ChaCha8Rng,
    now: Duration,
) {
    for worker in 0..stage.workers.len() {
        for partition in stage.owned(worker) {
            stage.feed(worker, partition, records, rng.random_range(0..TURN));
        }
        let in_flight = stage.workers[worker].log.inner.in_flight();
        stage.workers[worker].log.inner.deliver(rng.random_range(0..=in_flight), true);
        stage.workers[worker].keep(now).expect("keeps");
    }
}

/// Flips a bit of a snapshot.
fn damage(objects: &Arc<InMemory>, rng: &mut ChaCha8Rng) -> bool {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let found: Vec<_> = objects.list(None).try_collect().await.expect("lists");
        if found.len() < 4 {
            return false;
        }
        let victim = &found[rng.random_range(0..found.len())].location;
        let mut bytes = objects.get(victim).await.expect("there").bytes().await.expect("read").to_vec();
        let at = rng.random_range(0..bytes.len());
        bytes[at] ^= 4;
        objects.put(victim, bytes.into()).await.expect("written");
        true
    })
}

/// I5: the group knows of no offset beyond a snapshot that is stored.
fn commits_are_durable(broker: &Rc<RefCell<Broker>>, store: &Store) -> Result<(), Broke> {
    for ((topic, partition), committed) in &broker.borrow().committed {
        let names = store.list(&id(topic, *partition)).expect("lists");
        if names.last().is_none_or(|newest| newest.next_offset < *committed) {
            return Err((
                "I5",
                format!("{topic}/{partition} is committed up to {committed}, beyond {:?}", names.last()),
            ));
        }
    }
    Ok(())
}

/// What must be in the topics, by runs that know no fault.
struct Oracle {
    /// Bytes of stage 1's incidents by task and number.
    hosts: BTreeMap<(String, i64), Vec<u8>>,
    /// Numbers of what stage 1 tells each partition of the partials, by task.
    told: BTreeMap<(i32, String), BTreeSet<i64>>,
}

fn number_of(record: &Upstream) -> Option<(&str, i64)> {
    match record {
        Upstream::Partial(partial) => Some((&partial.task, partial.emit_seq)),
        Upstream::Watermark(watermark) => Some((&watermark.task, watermark.emit_seq)),
        Upstream::Topology { task, emit_seq, .. } => Some((task, *emit_seq)),
        Upstream::Exclusion(_) => None,
    }
}

impl Oracle {
    fn of(telemetry: &[Vec<(i64, Vec<u8>)>], config: &DetectorsConfig) -> Oracle {
        let mut oracle = Oracle { hosts: BTreeMap::new(), told: BTreeMap::new() };
        for (partition, records) in (0..).zip(telemetry) {
            let mut task = Task::new(id(TELEMETRY, partition), config);
            let mut outputs = Vec::new();
            for (offset, (appended_at, payload)) in (0..).zip(records) {
                task.step(Input { offset, appended_at: Some(*appended_at), payload }, &mut outputs);
            }
            for output in outputs {
                let (record, to): (Upstream, Vec<i32>) = match output {
                    Output::Incident(incident) => {
                        let mut bytes = Vec::new();
                        Encoder::default().incident(&incident, &mut bytes);
                        oracle.hosts.insert((incident.task.clone(), incident.emit_seq), bytes);
                        continue;
                    }
                    Output::Group { key, record } => {
                        (record, vec![gpufleet_schemas::partition::partition_of(&key, PARTIALS)])
                    }
                    Output::Everyone(record) => (record, (0..PARTIALS).collect()),
                    Output::Tombstone { .. } | Output::Itself(_) => continue,
                };
                if let Some((task, number)) = number_of(&record) {
                    for partition in to {
                        oracle.told.entry((partition, task.to_owned())).or_default().insert(number);
                    }
                }
            }
        }
        oracle
    }

    fn check(&self, broker: &Broker, upstream: &[String], config: &DetectorsConfig, once: bool) -> Result<(), Broke> {
        // Stage 2 against a run over what lies in its topic.
        let mut expected = self.hosts.clone();
        for partition in 0..PARTIALS {
            let mut task = GroupTask::new(id(PARTIALS_TOPIC, partition), upstream.to_vec(), config);
            let mut outputs = Vec::new();
            for (offset, stored) in (0..).zip(broker.partition(Stream::Partials, partition)) {
                let payload = stored.payload.as_deref().unwrap_or_default();
                task.step(Input { offset, appended_at: Some(stored.appended_at), payload }, &mut outputs);
            }
            for output in outputs {
                if let Output::Incident(incident) = output {
                    let mut bytes = Vec::new();
                    Encoder::default().incident(&incident, &mut bytes);
                    expected.insert((incident.task.clone(), incident.emit_seq), bytes);
                }
            }
        }
        let (decoder, mut found) = (Decoder::default(), BTreeMap::new());
        let mut newest: BTreeMap<String, i32> = BTreeMap::new();
        for partition in 0..INCIDENTS {
            for payload in broker.partition(Stream::Incidents, partition).iter().filter_map(|s| s.payload.as_ref()) {
                let incident = decoder.incident(payload).expect("an incident");
                let key = (incident.task.clone(), incident.emit_seq);
                if expected.get(&key) != Some(payload) {
                    return Err(("I1", format!("{key:?} is out and not what the oracle says")));
                }
                match found.insert(key.clone(), ()) {
                    None => {
                        let before = newest.insert(incident.id.clone(), incident.revision);
                        if before.is_some_and(|before| before >= incident.revision) {
                            return Err(("I2", format!("{} goes back to revision {}", incident.id, incident.revision)));
                        }
                    }
                    Some(()) if once => return Err(("once", format!("{key:?} is out twice"))),
                    Some(()) => {}
                }
            }
        }
        match expected.keys().find(|key| !found.contains_key(*key)) {
            Some(missing) => Err(("I1", format!("{missing:?} is not out"))),
            None => Ok(()),
        }
    }

    /// I3: what reaches stage 2 is each number of each task, once what comes twice is dropped.
    fn check_partials(&self, broker: &Broker) -> Result<(), Broke> {
        let decoder = Decoder::default();
        let mut heard: BTreeMap<(i32, String), (i64, BTreeSet<i64>)> = BTreeMap::new();
        for partition in 0..PARTIALS {
            for stored in broker.partition(Stream::Partials, partition) {
                let record = decoder.upstream(stored.payload.as_deref().unwrap_or_default()).expect("a record");
                let Some((task, number)) = number_of(&record) else { continue };
                let (newest, numbers) = heard.entry((partition, task.to_owned())).or_insert((-1, BTreeSet::new()));
                if number > *newest {
                    *newest = number;
                    numbers.insert(number);
                }
            }
        }
        for (key, numbers) in &self.told {
            let found = heard.get(key).map(|(_, numbers)| numbers);
            if found != Some(numbers) {
                let missing = numbers.iter().find(|number| found.is_none_or(|found| !found.contains(number)));
                return Err(("I3", format!("partition {} of {}: number {missing:?} did not come", key.0, key.1)));
            }
        }
        Ok(())
    }
}
