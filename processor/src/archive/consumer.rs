//! Feeds the tables from Kafka: reads, decodes, gathers, and commits every so many rows or seconds.
//!
//! Reading starts at the lowest offset that any table still needs; a table skips what it has.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use arrow::array::RecordBatch;
use arrow::error::ArrowError;
use gpufleet_runtime::exit::Failure;
use gpufleet_runtime::kafka::{self, Message, Reader, Start};
use gpufleet_runtime::lake::Lake;
use gpufleet_runtime::progress::Progress;
use gpufleet_runtime::topics::INCIDENT_PARTITIONS;
use gpufleet_schemas::Topics;
use gpufleet_schemas::table::Table;
use gpufleet_schemas::wire::{DecodeError, Decoded, Decoder};

use super::commit::{Partition, TableCommits};
use super::dead_letters::{DeadLetters, HELD_BACK};
use super::rows::{EventRows, IncidentRows, Loss, LossRows, Place, SampleRows, TickRows, TopologyRows};
use super::seen::Seen;

/// What the archive reads and where it writes.
#[derive(Clone, Debug)]
pub struct Options {
    pub brokers: String,
    pub topics: Topics,
    /// Partition count of the telemetry topic.
    pub partitions: i32,
    /// Identity of the log; the cluster's id when none is given.
    pub log_id: Option<String>,
    pub lake: PathBuf,
    /// Commit when so many samples wait, or so much time has passed. Other rows alone wait for the time.
    pub flush_rows: usize,
    pub flush_every: Duration,
    /// How long to wait for a broker at start.
    pub patience: Duration,
    /// Stop after so long without a record; none runs for ever.
    pub stop_when_idle: Option<Duration>,
}

/// What a run of the archive did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub samples: u64,
    pub events: u64,
    pub incidents: u64,
    pub losses: u64,
    pub dead_letters: u64,
    pub duplicates: u64,
    /// Bytes of the Parquet files written.
    pub bytes: u64,
}

/// Runs until it is asked to stop, the broker or the disk fails for good, or the log has been idle for long enough.
/// `telemetry` and `incidents` tell how far each topic was read.
pub fn run(options: &Options, telemetry: &Progress, incidents: &Progress) -> Result<Report, Failure> {
    let (brokers, topics) = (&options.brokers, &options.topics);
    let (cluster, layout) = kafka::connect(brokers, &[&topics.telemetry, &topics.incidents], options.patience)?;
    kafka::require(&layout, &topics.telemetry, options.partitions, brokers)?;
    kafka::require(&layout, &topics.incidents, INCIDENT_PARTITIONS, brokers)?;
    let log_id = options.log_id.clone().unwrap_or_else(|| kafka::log_id(&cluster, &topics.telemetry));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::external(format!("cannot start the archive: {error}")))?;
    let mut archive = runtime.block_on(Archive::open(options, log_id, INCIDENT_PARTITIONS))?;
    let reader = Reader::open(&options.brokers, &archive.starts())?;
    let (mut flushed_at, mut quiet_since) = (Instant::now(), Instant::now());
    loop {
        if telemetry.stopping() {
            break;
        }
        match reader.next(Duration::from_millis(50))? {
            Some(message) => {
                quiet_since = Instant::now();
                archive.take(&message)?;
                let progress = if message.topic == options.topics.telemetry { telemetry } else { incidents };
                progress.consumed(message.partition, message.offset, message.payload.len());
            }
            None if options.stop_when_idle.is_some_and(|idle| quiet_since.elapsed() >= idle) => break,
            None => {}
        }
        if archive.samples.rows() >= options.flush_rows || flushed_at.elapsed() >= options.flush_every {
            runtime.block_on(archive.flush())?;
            flushed_at = Instant::now();
        }
    }
    runtime.block_on(archive.flush())?;
    Ok(archive.report())
}

struct Archive {
    log_id: String,
    topics: Topics,
    tables: BTreeMap<Table, TableCommits>,
    decoder: Decoder,
    seen: Seen,
    dead_letters: DeadLetters,
    samples: SampleRows,
    events: EventRows,
    ticks: TickRows,
    topology: TopologyRows,
    incidents: IncidentRows,
    losses: LossRows,
    /// Next offset of each partition, as read.
    next: BTreeMap<Partition, i64>,
    duplicates: u64,
}

impl Archive {
    async fn open(options: &Options, log_id: String, incident_partitions: i32) -> Result<Archive, Failure> {
        let lake = Lake::create(&options.lake).await?;
        let of =
            |topic: &str, count: i32| (0..count).map(|partition| (topic.to_owned(), partition)).collect::<Vec<_>>();
        let telemetry = of(&options.topics.telemetry, options.partitions);
        let incidents = of(&options.topics.incidents, incident_partitions);
        let mut tables = BTreeMap::new();
        for table in Table::ALL {
            let partitions = match table {
                Table::GpuSamples | Table::XidEvents | Table::Ticks | Table::Topology => telemetry.clone(),
                Table::Incidents => incidents.clone(),
                Table::Losses => [telemetry.clone(), incidents.clone()].concat(),
            };
            tables.insert(table, TableCommits::open(&lake, table, &log_id, &partitions).await?);
        }
        let mut next = BTreeMap::new();
        for partition in telemetry.iter().chain(&incidents) {
            let offsets = tables.values().filter(|table| table.owns(partition)).map(|table| table.next(partition));
            next.insert(partition.clone(), offsets.min().unwrap_or(0));
        }
        let seen = Seen::load(&lake, &log_id, &next).await?;
        Ok(Archive {
            log_id,
            topics: options.topics.clone(),
            tables,
            decoder: Decoder::default(),
            seen,
            dead_letters: DeadLetters::open(&options.brokers, &options.topics.dead_letters)?,
            samples: SampleRows::default(),
            events: EventRows::default(),
            ticks: TickRows::default(),
            topology: TopologyRows::default(),
            incidents: IncidentRows::default(),
            losses: LossRows::default(),
            next,
            duplicates: 0,
        })
    }

    fn starts(&self) -> Vec<Start> {
        let start = |((topic, partition), offset): (&Partition, &i64)| Start {
            topic: topic.clone(),
            partition: *partition,
            offset: *offset,
        };
        self.next.iter().map(start).collect()
    }

    /// Turns a record into rows of the tables that do not have it yet.
    fn take(&mut self, message: &Message) -> Result<(), Failure> {
        let partition = (message.topic.clone(), message.partition);
        if self.next.get(&partition).is_some_and(|next| message.offset < *next) {
            return Ok(());
        }
        let wanted = self.wanted(&partition, message.offset);
        self.dead_letters.count(&partition, message.stamped_at);
        self.next.insert(partition, message.offset + 1);
        let log_id = self.log_id.clone();
        let place = Place {
            log_id: &log_id,
            topic: &message.topic,
            partition: message.partition,
            offset: message.offset,
            ingested_at: message.stamped_at,
        };
        let outcome = if message.topic != self.topics.incidents {
            self.take_telemetry(place, &message.payload, wanted)
        } else if message.payload.is_empty() {
            // A tombstone: it clears a key of a compacted topic and says nothing.
            Ok(())
        } else {
            self.take_incident(place, &message.payload, wanted)
        };
        if let Err(error) = outcome {
            let copied = self.dead_letters.write(message, &error)?;
            if wanted.losses {
                let detail = if copied { error.to_string() } else { HELD_BACK.to_owned() };
                let observed_at = message.stamped_at;
                self.losses.push(
                    place,
                    Loss {
                        observed_at,
                        origin: None,
                        stage: "archive",
                        reason: error.reason(),
                        count: 1,
                        detail: Some(&detail),
                    },
                );
            }
        }
        Ok(())
    }

    /// Which tables do not have the record at `offset` yet.
    fn wanted(&self, partition: &Partition, offset: i64) -> Wanted {
        let wants =
            |table: Table| self.tables.get(&table).is_some_and(|t| t.owns(partition) && t.next(partition) <= offset);
        Wanted {
            samples: wants(Table::GpuSamples),
            events: wants(Table::XidEvents),
            ticks: wants(Table::Ticks),
            topology: wants(Table::Topology),
            incidents: wants(Table::Incidents),
            losses: wants(Table::Losses),
        }
    }

    fn take_telemetry(&mut self, place: Place<'_>, payload: &[u8], wanted: Wanted) -> Result<(), DecodeError> {
        let repeated = |losses: &mut LossRows, origin| {
            let loss = Loss {
                observed_at: place.ingested_at,
                origin: Some(origin),
                stage: "archive",
                reason: "duplicate",
                count: 1,
                detail: None,
            };
            if wanted.losses {
                losses.push(place, loss);
            }
        };
        match self.decoder.telemetry(payload)? {
            Decoded::Tick(tick) => {
                if wanted.ticks {
                    self.ticks.push(place, &tick);
                }
            }
            Decoded::Topology(topology) => {
                if wanted.topology {
                    self.topology.push(place, &topology);
                }
            }
            Decoded::Batch(batch) => {
                if self.seen.repeats(&batch.origin) {
                    self.duplicates += 1;
                    repeated(&mut self.losses, &batch.origin);
                    return Ok(());
                }
                if wanted.samples {
                    self.samples.push(place, batch);
                }
                if wanted.losses {
                    self.losses.push_origin(place, &batch.origin);
                }
            }
            Decoded::Event(event) => {
                if self.seen.repeats(&event.origin) {
                    self.duplicates += 1;
                    repeated(&mut self.losses, &event.origin);
                    return Ok(());
                }
                if wanted.events {
                    self.events.push(place, &event);
                }
                if wanted.losses {
                    self.losses.push_origin(place, &event.origin);
                }
            }
        }
        Ok(())
    }

    fn take_incident(&mut self, place: Place<'_>, payload: &[u8], wanted: Wanted) -> Result<(), DecodeError> {
        let incident = self.decoder.incident(payload)?;
        if self.seen.repeats_output(&incident.task, place.partition, incident.emit_seq) {
            self.duplicates += 1;
        } else if wanted.incidents {
            self.incidents.push(place, &incident);
        }
        Ok(())
    }

    /// Commits what has gathered. Dead letters first: their offsets go with the rows.
    async fn flush(&mut self) -> Result<(), Failure> {
        self.dead_letters.flush()?;
        let rows = |count: usize, finish: &mut dyn FnMut() -> Result<RecordBatch, ArrowError>| {
            let batch = if count > 0 { Some(finish()) } else { None };
            batch.transpose().map_err(|error| Failure::bug(format!("rows do not fit their table: {error}")))
        };
        let batches = [
            (Table::GpuSamples, rows(self.samples.rows(), &mut || self.samples.finish())?),
            (Table::XidEvents, rows(self.events.rows(), &mut || self.events.finish())?),
            (Table::Ticks, rows(self.ticks.rows(), &mut || self.ticks.finish())?),
            (Table::Topology, rows(self.topology.rows(), &mut || self.topology.finish())?),
            (Table::Incidents, rows(self.incidents.rows(), &mut || self.incidents.finish())?),
            (Table::Losses, rows(self.losses.rows(), &mut || self.losses.finish())?),
        ];
        for (table, batch) in batches {
            if let Some(commits) = self.tables.get_mut(&table) {
                let next = self.next.iter().filter(|(partition, _)| commits.owns(partition));
                let next: BTreeMap<Partition, i64> =
                    next.map(|(partition, offset)| (partition.clone(), *offset)).collect();
                commits.commit(batch, &next).await?;
            }
        }
        Ok(())
    }

    fn report(&self) -> Report {
        let rows = |table| self.tables.get(&table).map_or(0, |commits: &TableCommits| commits.rows);
        Report {
            samples: rows(Table::GpuSamples),
            events: rows(Table::XidEvents),
            incidents: rows(Table::Incidents),
            losses: rows(Table::Losses),
            dead_letters: self.dead_letters.written,
            duplicates: self.duplicates,
            bytes: self.tables.values().map(|commits| commits.bytes).sum(),
        }
    }
}

/// Which tables still need a record.
#[derive(Clone, Copy)]
struct Wanted {
    samples: bool,
    events: bool,
    ticks: bool,
    topology: bool,
    incidents: bool,
    losses: bool,
}
