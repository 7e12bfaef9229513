//! A task of stage 1: a pure function of one telemetry partition's records in offset order (law L1).
//!
//! Takes payloads with their offsets and gives incidents, and what stage 2 needs: partials, watermarks and topology. It
//! reads no clock and does no I/O; bytes that are no record are counted and otherwise left to the archive, which sends
//! them to the dead-letter topic.

use std::collections::BTreeMap;

use gpufleet_schemas::instant::SECOND;
use gpufleet_schemas::metric::{Metric, MetricSet};
use gpufleet_schemas::record::{GpuBatch, Incident, Origin, Telemetry, Upstream, Watermark, XidEvent};
use gpufleet_schemas::wire::{Decoded, Decoder};
use serde::{Deserialize, Serialize};

use super::coverage_gap::CoverageGap;
use super::ecc_rate::EccRate;
use super::ecc_uncorrectable::EccUncorrectable;
use super::partials::Partials;
use super::thermal_throttle::ThermalThrottle;
use super::xid::Xid;
use super::{Detector, DetectorsConfig, Source};
use crate::engine::book::{Pages, TaskId};
use crate::engine::clock::Bounds;
use crate::engine::machine::{numbers_of_next_version, section};
use crate::engine::{Ahead, Book, Clock, Entities, Entity, Finding, Input, Machine, Output, Section, StateError};

/// The metrics that some detector reads; the decoder steps over the others.
pub const WANTED: MetricSet = MetricSet::of(&[
    Metric::PowerDraw,
    Metric::ClocksEventReasons,
    Metric::ClockSm,
    Metric::TemperatureGpu,
    Metric::EccSbeVolatile,
    Metric::EccDbeVolatile,
    Metric::EccDbeAggregate,
    Metric::RowRemapPending,
    Metric::RowRemapFailed,
]);

/// Boots of a host whose record numbers are remembered; older ones are over.
const BOOTS_REMEMBERED: usize = 8;
/// Format of the section `task`.
const FORMAT: u32 = 1;

/// What a task has seen and left out (law L4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    pub records: u64,
    pub undecodable: u64,
    pub duplicates: u64,
    pub from_the_future: u64,
    pub too_late: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        self.records += other.records;
        self.undecodable += other.undecodable;
        self.duplicates += other.duplicates;
        self.from_the_future += other.from_the_future;
        self.too_late += other.too_late;
    }
}

/// What is neither a detector's nor the book's.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Seen {
    clock: Clock,
    /// Newest record number per host and boot, the boots in the order in which they came.
    numbers: BTreeMap<String, Vec<(String, i64)>>,
    epochs: BTreeMap<String, Epoch>,
    entities: Entities,
    advanced_to: Option<i64>,
    counts: Counts,
    /// Number of the next output.
    emit_seq: i64,
}

/// Since when a host's volatile counters count.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Epoch {
    boot: String,
    reset_epoch: i32,
    /// How many times they were zeroed since the host is known, and the earliest record that shows the last time.
    number: u32,
    since: i64,
}

/// Detection over one partition.
pub struct Task {
    id: TaskId,
    name: String,
    decoder: Decoder,
    bounds: Bounds,
    lateness: i64,
    seen: Seen,
    detectors: Vec<Box<dyn Detector>>,
    partials: Partials,
    book: Book,
    findings: Vec<Finding>,
    revisions: Vec<Incident>,
}

impl Task {
    pub fn new(id: TaskId, config: &DetectorsConfig) -> Task {
        let mut detectors: Vec<Box<dyn Detector>> = Vec::new();
        if config.xid.enabled {
            detectors.push(Box::new(Xid::new(&config.xid)));
        }
        if config.ecc_uncorrectable.enabled {
            detectors.push(Box::new(EccUncorrectable::default()));
        }
        if config.ecc_rate.enabled {
            detectors.push(Box::new(EccRate::new(&config.ecc_rate)));
        }
        if config.thermal_throttle.enabled {
            detectors.push(Box::new(ThermalThrottle::new(&config.thermal_throttle)));
        }
        if config.coverage_gap.enabled {
            detectors.push(Box::new(CoverageGap::new(&config.coverage_gap, &id)));
        }
        Task {
            name: id.to_string(),
            decoder: Decoder::wanting(WANTED),
            bounds: config.engine.bounds(),
            lateness: config.engine.allowed_lateness,
            seen: Seen::default(),
            detectors,
            partials: Partials::new(config.feed_over_rating.pane),
            book: Book::new(id.clone(), config.engine.spans()),
            findings: Vec::new(),
            revisions: Vec::new(),
            id,
        }
    }

    pub fn counts(&self) -> Counts {
        let too_late = self.detectors.iter().map(|detector| detector.too_late()).sum::<u64>() + self.partials.too_late;
        Counts { from_the_future: self.seen.clock.from_the_future, too_late, ..self.seen.counts }
    }

    pub fn open_count(&self) -> usize {
        self.book.open_count()
    }

    /// How far event time has come.
    pub fn watermark(&self) -> Option<i64> {
        self.seen.advanced_to
    }

    /// GPUs that the task knows.
    pub fn gpus(&self) -> usize {
        self.seen.entities.len()
    }

    /// Takes a record that is decoded already, as the lake gives it.
    pub fn take(&mut self, offset: i64, appended_at: Option<i64>, record: &Telemetry, outputs: &mut Vec<Output>) {
        self.seen.counts.records += 1;
        self.detectors.iter_mut().for_each(|detector| detector.looked_at(offset, false));
        match record {
            Telemetry::Tick(tick) => self.seen.clock.tick(tick.tick_at, appended_at, self.bounds),
            Telemetry::Event(event) => {
                event_in(event, offset, appended_at, self.bounds, &mut self.seen, &mut self.detectors)
            }
            Telemetry::Batch(batch) => batch_in(
                batch,
                offset,
                appended_at,
                self.bounds,
                &mut self.seen,
                &mut self.detectors,
                &mut self.partials,
            ),
            // One whose time has not come would hide every later one.
            Telemetry::Topology(topology)
                if self.seen.clock.ahead(topology.epoch_at, appended_at, self.bounds) != Ahead::No => {}
            Telemetry::Topology(topology) => {
                let emit_seq = number(&mut self.seen.emit_seq);
                let (task, topology) = (self.name.clone(), topology.clone());
                outputs.push(Output::Everyone(Upstream::Topology { task, emit_seq, topology }));
            }
        }
        self.advance(outputs);
    }

    /// Lets the detectors speak when the watermark has passed a whole second.
    fn advance(&mut self, outputs: &mut Vec<Output>) {
        let Some(watermark) = self.seen.clock.watermark(self.bounds) else { return };
        let now = watermark.div_euclid(SECOND) * SECOND;
        if self.seen.advanced_to.is_some_and(|before| now <= before) {
            return;
        }
        self.seen.advanced_to = Some(now);
        let floor = now.saturating_sub(self.lateness);
        // A kind that no detector looks for any more is not heard again.
        let mut silent: Vec<&'static str> = Vec::new();
        for detector in &mut self.detectors {
            if !detector.advance(now, floor, &self.seen.entities, &mut self.findings) {
                silent.push(detector.kind());
            }
        }
        // The first of one cause is its page, whichever detector speaks first.
        self.findings.sort_by_key(|finding| finding.onset_at);
        for finding in self.findings.drain(..) {
            self.revisions.extend(self.book.record(finding, now));
        }
        self.book.withdraw(now, |kind| !silent.contains(&kind), &mut self.revisions);
        outputs.extend(self.revisions.drain(..).map(|mut incident| {
            incident.emit_seq = number(&mut self.seen.emit_seq);
            Output::Incident(Box::new(incident))
        }));
        outputs.extend(self.book.sweep(now).into_iter().map(|id| Output::Tombstone { id }));
        let (name, emit_seq) = (&self.name, &mut self.seen.emit_seq);
        self.partials.advance(now, floor, |mut partial| {
            partial.task.clone_from(name);
            partial.emit_seq = number(emit_seq);
            outputs.push(Output::Group { key: partial.key.clone(), record: Upstream::Partial(partial) });
        });
        let watermark = Watermark { task: name.clone(), emit_seq: number(emit_seq), watermark_at: now };
        outputs.push(Output::Everyone(Upstream::Watermark(watermark)));
    }
}

/// The next number of a task's outputs.
fn number(emit_seq: &mut i64) -> i64 {
    let number = *emit_seq;
    *emit_seq += 1;
    number
}

impl Machine for Task {
    fn id(&self) -> &TaskId {
        &self.id
    }

    fn step(&mut self, input: Input<'_>, outputs: &mut Vec<Output>) {
        let Input { offset, appended_at, payload } = input;
        match self.decoder.telemetry(payload) {
            Err(_) => {
                self.seen.counts.records += 1;
                self.seen.counts.undecodable += 1;
                self.detectors.iter_mut().for_each(|detector| detector.looked_at(offset, true));
                self.advance(outputs);
            }
            Ok(Decoded::Batch(batch)) => {
                // Lies in the decoder's own memory: the hot path copies nothing.
                self.seen.counts.records += 1;
                self.detectors.iter_mut().for_each(|detector| detector.looked_at(offset, false));
                batch_in(
                    batch,
                    offset,
                    appended_at,
                    self.bounds,
                    &mut self.seen,
                    &mut self.detectors,
                    &mut self.partials,
                );
                self.advance(outputs);
            }
            Ok(Decoded::Event(event)) => self.take(offset, appended_at, &Telemetry::Event(event), outputs),
            Ok(Decoded::Tick(tick)) => self.take(offset, appended_at, &Telemetry::Tick(tick), outputs),
            Ok(Decoded::Topology(topology)) => self.take(offset, appended_at, &Telemetry::Topology(topology), outputs),
        }
    }

    fn gap(&mut self, from: i64, to: i64) {
        self.detectors.iter_mut().for_each(|detector| detector.gap(from, to));
    }

    fn start_anew(&mut self, said: Vec<Incident>) {
        self.seen.emit_seq = numbers_of_next_version(self.seen.emit_seq, &said);
        self.book.take_over(said);
    }

    fn save(&self) -> Vec<Section> {
        let mut sections = vec![
            Section::of("task", FORMAT, &self.seen),
            Section::of("book", FORMAT, self.book.pages()),
            Section::of("partials", FORMAT, &self.partials),
        ];
        sections.extend(self.detectors.iter().map(|detector| detector.save()));
        sections
    }

    fn load(&mut self, sections: &[Section]) -> Result<(), StateError> {
        self.seen = section(sections, "task")?.read(FORMAT)?;
        self.book.restore(section(sections, "book")?.read::<Pages>(FORMAT)?);
        let partials: Partials = section(sections, "partials")?.read(FORMAT)?;
        if partials.pane() == self.partials.pane() {
            self.partials = partials;
        }
        for detector in &mut self.detectors {
            detector.load(section(sections, detector.kind())?)?;
        }
        Ok(())
    }

    fn take_over(&mut self, sections: &[Section]) -> Result<(), StateError> {
        self.seen = section(sections, "task")?.read(FORMAT)?;
        self.book.restore(section(sections, "book")?.read::<Pages>(FORMAT)?);
        if let Ok(partials) = section(sections, "partials").and_then(|section| section.read::<Partials>(FORMAT))
            && partials.pane() == self.partials.pane()
        {
            self.partials = partials;
        }
        for detector in &mut self.detectors {
            // A detector that is new, or keeps its state otherwise now, starts afresh; its open incidents are withdrawn
            // unless it finds them again.
            if let Ok(section) = section(sections, detector.kind()) {
                let _ = detector.load(section);
            }
        }
        Ok(())
    }
}

fn event_in(
    event: &XidEvent,
    offset: i64,
    appended_at: Option<i64>,
    bounds: Bounds,
    seen: &mut Seen,
    detectors: &mut [Box<dyn Detector>],
) {
    if is_repeat(&mut seen.numbers, &event.origin) {
        seen.counts.duplicates += 1;
        return;
    }
    let known = seen.clock.known(appended_at);
    let ahead = seen.clock.data(event.origin.observed_at, appended_at, bounds) == Ahead::Horizon;
    match known.filter(|_| ahead) {
        None => show_event(event, offset, &seen.entities, detectors),
        // A fatal fact whose clock means nothing counts from now on.
        Some(known) => {
            let mut event = event.clone();
            event.origin.observed_at = known;
            show_event(&event, offset, &seen.entities, detectors);
        }
    }
}

fn batch_in(
    batch: &GpuBatch,
    offset: i64,
    appended_at: Option<i64>,
    bounds: Bounds,
    seen: &mut Seen,
    detectors: &mut [Box<dyn Detector>],
    partials: &mut Partials,
) {
    if is_repeat(&mut seen.numbers, &batch.origin) {
        seen.counts.duplicates += 1;
        return;
    }
    let newest = batch.tick_at(batch.ticks.len().saturating_sub(1));
    if seen.clock.data(newest, appended_at, bounds) == Ahead::Horizon {
        return;
    }
    let boots = seen.numbers.get(batch.origin.host.as_str());
    let newest_boot = boots.and_then(|boots| boots.last()).is_some_and(|(boot, _)| *boot == batch.origin.boot_id);
    // A batch of a boot that is over has only come late.
    let zeroed = newest_boot.then(|| zeroed(&mut seen.epochs, &batch.origin)).flatten();
    show_batch(batch, offset, zeroed, &mut seen.entities, detectors, partials);
}

/// A record whose number its host and boot have shown before.
fn is_repeat(numbers: &mut BTreeMap<String, Vec<(String, i64)>>, origin: &Origin) -> bool {
    let Some(boots) = numbers.get_mut(origin.host.as_str()) else {
        numbers.insert(origin.host.clone(), vec![(origin.boot_id.clone(), origin.seq)]);
        return false;
    };
    match boots.iter_mut().rfind(|(boot, _)| *boot == origin.boot_id) {
        Some((_, newest)) if origin.seq <= *newest => return true,
        Some((_, newest)) => *newest = origin.seq,
        None => {
            boots.push((origin.boot_id.clone(), origin.seq));
            if boots.len() > BOOTS_REMEMBERED {
                boots.remove(0);
            }
        }
    }
    false
}

/// The number of the reset that this record is the earliest to show, if it shows one.
fn zeroed(epochs: &mut BTreeMap<String, Epoch>, origin: &Origin) -> Option<u32> {
    let Some(epoch) = epochs.get_mut(origin.host.as_str()) else {
        let (boot, reset_epoch, since) = (origin.boot_id.clone(), origin.reset_epoch, origin.observed_at);
        epochs.insert(origin.host.clone(), Epoch { boot, reset_epoch, number: 0, since });
        return None;
    };
    let same_boot = epoch.boot == origin.boot_id;
    // Recordings are no boots: one file after another says nothing about the host. A record of an earlier epoch has only
    // come late.
    if (!same_boot && !origin.recorded()) || (same_boot && epoch.reset_epoch < origin.reset_epoch) {
        epoch.boot.clone_from(&origin.boot_id);
        epoch.reset_epoch = origin.reset_epoch;
        epoch.number += 1;
        epoch.since = origin.observed_at;
        return Some(epoch.number);
    }
    let earlier = same_boot && epoch.reset_epoch == origin.reset_epoch && origin.observed_at < epoch.since;
    if earlier {
        epoch.since = origin.observed_at;
    }
    (earlier && epoch.number > 0).then_some(epoch.number)
}

fn show_batch(
    batch: &GpuBatch,
    offset: i64,
    zeroed: Option<u32>,
    entities: &mut Entities,
    detectors: &mut [Box<dyn Detector>],
    partials: &mut Partials,
) {
    let origin = &batch.origin;
    let source = Source { offset, seq: origin.seq };
    if let Some(number) = zeroed {
        detectors.iter_mut().for_each(|detector| detector.reset(&origin.host, origin.observed_at, number, source));
    }
    for block in &batch.gpus {
        let gpu = entities.observe(batch, block);
        for detector in &mut *detectors {
            detector.block(gpu, batch, block, source);
        }
        partials.block(gpu, batch, block, offset);
    }
}

fn show_event(event: &XidEvent, offset: i64, entities: &Entities, detectors: &mut [Box<dyn Detector>]) {
    let host = event.origin.host.as_str();
    let known = match (&event.gpu_uuid, &event.pci) {
        (Some(uuid), _) => entities.by_uuid(uuid),
        (None, Some(pci)) => entities.in_slot(host, pci),
        (None, None) => None,
    };
    let entity = known.cloned().unwrap_or_else(|| Entity {
        gpu_uuid: event.gpu_uuid.clone(),
        pci: event.pci.clone(),
        job_id: event.job_id.clone(),
        ..Entity::of_host(host, &event.labels)
    });
    for detector in detectors {
        detector.event(event, &entity, Source { offset, seq: event.origin.seq });
    }
}
