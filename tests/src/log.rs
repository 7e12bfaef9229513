//! Logs that tests publish, and what an offline run over a log says.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use gpufleet_collector::publisher::{Pace, Publisher};
use gpufleet_collector::simulator::{FleetOptions, Simulator};
use gpufleet_collector::source::{Source, SourceError};
use gpufleet_processor::detect::sink::read_all;
use gpufleet_processor::detect::{DetectorsConfig, GroupTask, Task};
use gpufleet_processor::engine::book::TaskId;
use gpufleet_processor::engine::{Input, Machine, Output};
use gpufleet_runtime::kafka::{Destination, Writer, connect, log_id};
use gpufleet_runtime::topics::{INCIDENT_PARTITIONS, apply, specs};
use gpufleet_schemas::Topics;
use gpufleet_schemas::instant::SECOND;
use gpufleet_schemas::record::{EventKind, Labels, Origin, Telemetry, XidEvent};
use gpufleet_schemas::wire::{Decoder, Encoder};

/// Partitions of the telemetry topic in tests.
pub const PARTITIONS: i32 = 4;
/// Partitions of the partials topic in tests.
pub const PARTIALS: i32 = 2;
const PATIENCE: Duration = Duration::from_secs(30);

/// Topics of one test's own on a broker that tests share.
pub struct Log {
    pub brokers: String,
    pub prefix: String,
    pub topics: Topics,
    pub samples: u64,
    pub events: u64,
}

impl Log {
    /// Creates the topics.
    pub fn create(brokers: &str) -> Log {
        Log::replicated(brokers, 1)
    }

    /// Creates the topics with so many replicas.
    pub fn replicated(brokers: &str, replication: i32) -> Log {
        let prefix = format!("test-{}.", &uuid::Uuid::new_v4().simple().to_string()[..8]);
        let topics = Topics::with_prefix(&prefix);
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let outcome = runtime
            .block_on(apply(brokers, &specs(&topics, PARTITIONS, PARTIALS, replication), PATIENCE))
            .expect("the topics");
        assert_eq!((outcome.created.len(), outcome.verified.len(), outcome.differs.len()), (4, 4, 0), "{outcome:?}");
        Log { brokers: brokers.to_owned(), prefix, topics, samples: 0, events: 0 }
    }

    /// Publishes a source and remembers what the broker has acknowledged.
    pub fn publish(&mut self, source: &mut dyn Source) {
        let mut publisher =
            Publisher::open(&self.brokers, &self.topics.telemetry, PARTITIONS, Some("test")).expect("a publisher");
        let acknowledged = publisher.acknowledged();
        publisher.run(source, &Pace::Unbound, &mut |_| true).expect("published");
        self.samples += acknowledged.samples();
        self.events += acknowledged.events();
    }

    /// Publishes records to their partitions as they are, spread over `wall`.
    pub fn publish_records(&mut self, records: &[(i32, Telemetry)], wall: Duration) {
        let writer = Writer::open(&self.brokers).expect("a writer");
        let (encoder, mut bytes, start) = (Encoder::default(), Vec::new(), Instant::now());
        for (i, (partition, record)) in (1..).zip(records) {
            encoder.telemetry(record, &mut bytes);
            let to = Destination { topic: &self.topics.telemetry, partition: *partition };
            writer.send(to, b"test", Some(&bytes), &[], |_| {}).expect("accepted");
            match record {
                Telemetry::Batch(batch) => self.samples += batch.sample_count() as u64,
                Telemetry::Event(_) => self.events += 1,
                Telemetry::Tick(_) | Telemetry::Topology(_) => {}
            }
            let due = wall.mul_f64(f64::from(i) / records.len() as f64);
            if let Some(rest) = due.checked_sub(start.elapsed()) {
                std::thread::sleep(rest);
            }
        }
        writer.flush(Duration::from_secs(120)).expect("acknowledged");
    }

    /// The arguments that point a program at this log.
    pub fn arguments(&self) -> Vec<String> {
        let partitions = PARTITIONS.to_string();
        [
            "--brokers",
            &self.brokers,
            "--topic-prefix",
            &self.prefix,
            "--partitions",
            &partitions,
            "--stop-when-idle",
            "2s",
        ]
        .map(str::to_owned)
        .to_vec()
    }

    /// What detection needs beyond them; its snapshots lie in `folder`.
    pub fn detect_arguments(&self, folder: &std::path::Path) -> Vec<String> {
        let (partials, snapshots) = (PARTIALS.to_string(), folder.join(&self.prefix).display().to_string());
        let more = ["--partials", &partials, "--clock", "log", "--snapshots", &snapshots];
        more.map(str::to_owned).to_vec()
    }

    /// The incidents' bytes in the topic, by task and number, none of them twice.
    pub fn incidents(&self) -> BTreeMap<(String, i64), Vec<u8>> {
        let (found, repeats) = self.incidents_and_repeats();
        assert_eq!(repeats, 0, "incidents were sent twice");
        found
    }

    /// The incidents' bytes in the topic, by task and number, and how many stand there twice: two owners of one task may
    /// repeat each other, and never contradict. Revisions of an id go up (I2).
    pub fn incidents_and_repeats(&self) -> (BTreeMap<(String, i64), Vec<u8>>, usize) {
        let (decoder, mut repeats) = (Decoder::default(), 0);
        let mut found = BTreeMap::new();
        let mut newest: BTreeMap<String, i32> = BTreeMap::new();
        for message in read_all(&self.brokers, &self.topics.incidents, INCIDENT_PARTITIONS).expect("incidents") {
            let incident = decoder.incident(&message.payload).expect("an incident");
            let key = (incident.task, incident.emit_seq);
            match found.insert(key.clone(), message.payload.clone()) {
                Some(before) => {
                    assert_eq!(before, message.payload, "{key:?} stands there with two contents");
                    repeats += 1;
                }
                None => {
                    let before = newest.insert(incident.id.clone(), incident.revision);
                    assert!(before.is_none_or(|before| before < incident.revision), "{key:?} goes back");
                }
            }
        }
        (found, repeats)
    }

    /// What both stages give over what lies in their topics from offset 0, outside of any process of ours and any broker
    /// (law L2).
    pub fn replay(&self) -> BTreeMap<(String, i64), Vec<u8>> {
        let (cluster, _) = connect(&self.brokers, &[], PATIENCE).expect("the cluster");
        let log_id = log_id(&cluster, &self.topics.telemetry);
        let config = DetectorsConfig::default();
        let id = |topic: &str, partition| TaskId { log_id: log_id.clone(), topic: topic.to_owned(), partition };
        let hosts: Vec<Task> =
            (0..PARTITIONS).map(|partition| Task::new(id(&self.topics.telemetry, partition), &config)).collect();
        let upstream: Vec<String> = hosts.iter().map(|task| task.id().to_string()).collect();
        let groups: Vec<GroupTask> = (0..PARTIALS)
            .map(|partition| GroupTask::new(id(&self.topics.partials, partition), upstream.clone(), &config))
            .collect();
        let mut found = BTreeMap::new();
        run_over(&self.brokers, &self.topics.telemetry, hosts, &mut found);
        run_over(&self.brokers, &self.topics.partials, groups, &mut found);
        found
    }
}

/// Runs a task per partition over everything that a topic holds.
fn run_over<M: Machine>(brokers: &str, topic: &str, mut tasks: Vec<M>, found: &mut BTreeMap<(String, i64), Vec<u8>>) {
    let partitions = i32::try_from(tasks.len()).expect("few");
    let mut messages = read_all(brokers, topic, partitions).expect("the log");
    messages.sort_by_key(|message| (message.partition, message.offset));
    let (encoder, mut outputs) = (Encoder::default(), Vec::new());
    for message in messages {
        let input = Input { offset: message.offset, appended_at: message.appended_at(), payload: &message.payload };
        tasks[message.partition as usize].step(input, &mut outputs);
        for output in outputs.drain(..) {
            if let Output::Incident(incident) = output {
                let mut bytes = Vec::new();
                encoder.incident(&incident, &mut bytes);
                found.insert((incident.task, incident.emit_seq), bytes);
            }
        }
    }
}

/// A simulated fleet with its planted faults, and a host whose kernel log never stops.
pub struct Busy {
    fleet: Simulator,
    ready: VecDeque<Telemetry>,
    start_at: i64,
    span: i64,
    events: i64,
    sent: i64,
}

impl Busy {
    /// `gpus` at 10 Hz over `seconds`, and `events` events of one more host spread over them.
    pub fn new(seed: u64, gpus: usize, seconds: i64, events: i64) -> Busy {
        let (start_at, span) = (1_772_442_000 * SECOND, seconds * SECOND);
        let options = FleetOptions { seed, gpus, start_at, span, fast_hertz: 10, run: "test".into() };
        Busy { fleet: Simulator::new(options), ready: VecDeque::new(), start_at, span, events, sent: 0 }
    }

    fn event(&mut self) -> Telemetry {
        let at = self.start_at + self.span * self.sent / self.events;
        let code = [13, 31, 43, 63, 74][self.sent as usize % 5];
        let message = format!("number {}", self.sent);
        let event = XidEvent {
            origin: Origin {
                host: "stormy".into(),
                boot_id: "b".into(),
                seq: self.sent,
                observed_at: at,
                ..Origin::default()
            },
            labels: Labels::default(),
            kind: EventKind::Xid,
            code: Some(code),
            pci: Some("00000000:1b:00".into()),
            raw: format!("NVRM: Xid (PCI:0000:1b:00): {code}, {message}"),
            message,
            ..XidEvent::default()
        };
        self.sent += 1;
        Telemetry::Event(event)
    }
}

impl Source for Busy {
    fn next(&mut self) -> Result<Option<Telemetry>, SourceError> {
        if let Some(ready) = self.ready.pop_front() {
            return Ok(Some(ready));
        }
        let Some(record) = self.fleet.next()? else {
            return Ok(if self.sent < self.events { Some(self.event()) } else { None });
        };
        let due = (record.newest_at() - self.start_at) * self.events / self.span;
        while self.sent < due.min(self.events) {
            let event = self.event();
            self.ready.push_back(event);
        }
        self.ready.push_back(record);
        Ok(self.ready.pop_front())
    }
}
