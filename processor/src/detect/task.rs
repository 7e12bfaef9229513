//! One detect task: a pure function of one partition's records in offset order (law L1).
//!
//! Takes payloads with their offsets and gives incidents. It reads no clock and does no I/O; bytes that are no record
//! are counted and otherwise left to the archive, which sends them to the dead-letter topic.

use std::collections::BTreeMap;

use gpufleet_schemas::instant::SECOND;
use gpufleet_schemas::metric::{Metric, MetricSet};
use gpufleet_schemas::record::{GpuBatch, Incident, Origin, XidEvent};
use gpufleet_schemas::wire::{Decoded, Decoder};

use super::ecc_rate::EccRate;
use super::ecc_uncorrectable::EccUncorrectable;
use super::thermal_throttle::ThermalThrottle;
use super::xid::Xid;
use super::{Detector, DetectorsConfig, Source};
use crate::engine::book::TaskId;
use crate::engine::{Book, Clock, Entities, Entity, Finding};

/// The metrics that some detector reads; the decoder steps over the others.
pub const WANTED: MetricSet = MetricSet::of(&[
    Metric::ClocksEventReasons,
    Metric::ClockSm,
    Metric::TemperatureGpu,
    Metric::EccSbeVolatile,
    Metric::EccDbeVolatile,
    Metric::EccDbeAggregate,
    Metric::RowRemapPending,
    Metric::RowRemapFailed,
]);

/// What a task has seen and left out (law L4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub records: u64,
    pub undecodable: u64,
    pub duplicates: u64,
    pub from_the_future: u64,
    pub too_late: u64,
}

/// Detection over one partition.
pub struct Task {
    id: TaskId,
    decoder: Decoder,
    clock: Clock,
    lateness: i64,
    /// Newest record number per (host, boot).
    seen: BTreeMap<String, BTreeMap<String, i64>>,
    /// Boot and reset epoch per host.
    epochs: BTreeMap<String, (String, i32)>,
    entities: Entities,
    detectors: Vec<Box<dyn Detector>>,
    book: Book,
    advanced_to: Option<i64>,
    counts: Counts,
    findings: Vec<Finding>,
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
        Task {
            decoder: Decoder::wanting(WANTED),
            clock: Clock::new(config.engine.disorder_bound, config.engine.future_bound),
            lateness: config.engine.allowed_lateness,
            seen: BTreeMap::new(),
            epochs: BTreeMap::new(),
            entities: Entities::default(),
            detectors,
            book: Book::new(id.clone(), config.engine.flap_guard),
            advanced_to: None,
            counts: Counts::default(),
            findings: Vec::new(),
            id,
        }
    }

    pub fn id(&self) -> &TaskId {
        &self.id
    }

    pub fn counts(&self) -> Counts {
        let too_late = self.detectors.iter().map(|detector| detector.too_late()).sum();
        Counts { from_the_future: self.clock.from_the_future, too_late, ..self.counts }
    }

    pub fn open_count(&self) -> usize {
        self.book.open_count()
    }

    /// Takes the record at `offset`; adds the incidents that it makes.
    pub fn step(&mut self, offset: i64, payload: &[u8], incidents: &mut Vec<Incident>) {
        self.counts.records += 1;
        match self.decoder.telemetry(payload) {
            Err(_) => self.counts.undecodable += 1,
            Ok(Decoded::Tick(tick)) => self.clock.tick(tick.tick_at),
            Ok(Decoded::Event(event)) => {
                if is_repeat(&mut self.seen, &event.origin) {
                    self.counts.duplicates += 1;
                } else {
                    self.clock.data(event.origin.observed_at);
                    show_event(&event, offset, &self.entities, &mut self.detectors);
                }
            }
            Ok(Decoded::Batch(batch)) => {
                if is_repeat(&mut self.seen, &batch.origin) {
                    self.counts.duplicates += 1;
                } else {
                    self.clock.data(batch.tick_at(batch.ticks.len().saturating_sub(1)));
                    show_batch(batch, offset, &mut self.epochs, &mut self.entities, &mut self.detectors);
                }
            }
        }
        self.advance(incidents);
    }

    /// Lets the detectors speak when the watermark has passed a whole second.
    fn advance(&mut self, incidents: &mut Vec<Incident>) {
        let Some(watermark) = self.clock.watermark() else { return };
        let now = watermark.div_euclid(SECOND) * SECOND;
        if self.advanced_to.is_some_and(|before| now <= before) {
            return;
        }
        self.advanced_to = Some(now);
        for detector in &mut self.detectors {
            detector.advance(now, now.saturating_sub(self.lateness), &self.entities, &mut self.findings);
        }
        for finding in self.findings.drain(..) {
            incidents.extend(self.book.record(finding, now));
        }
    }
}

/// A record whose number its host and boot have shown before.
fn is_repeat(seen: &mut BTreeMap<String, BTreeMap<String, i64>>, origin: &Origin) -> bool {
    let newest = seen.get(origin.host.as_str()).and_then(|boots| boots.get(origin.boot_id.as_str()));
    if newest.is_some_and(|newest| origin.seq <= *newest) {
        return true;
    }
    match seen.get_mut(origin.host.as_str()).and_then(|boots| boots.get_mut(origin.boot_id.as_str())) {
        Some(newest) => *newest = origin.seq,
        None => {
            seen.entry(origin.host.clone()).or_default().insert(origin.boot_id.clone(), origin.seq);
        }
    }
    false
}

fn show_batch(
    batch: &GpuBatch,
    offset: i64,
    epochs: &mut BTreeMap<String, (String, i32)>,
    entities: &mut Entities,
    detectors: &mut [Box<dyn Detector>],
) {
    let origin = &batch.origin;
    let source = Source { offset, seq: origin.seq };
    match epochs.get_mut(origin.host.as_str()) {
        None => {
            epochs.insert(origin.host.clone(), (origin.boot_id.clone(), origin.reset_epoch));
        }
        // Recordings are no boots: one file after another says nothing about the host.
        Some((boot, epoch)) if (*boot != origin.boot_id && !origin.recorded()) || *epoch != origin.reset_epoch => {
            boot.clone_from(&origin.boot_id);
            *epoch = origin.reset_epoch;
            for detector in &mut *detectors {
                detector.reset(&origin.host, origin.observed_at, source);
            }
        }
        Some(_) => {}
    }
    for block in &batch.gpus {
        let gpu = entities.observe(batch, block);
        for detector in &mut *detectors {
            detector.block(gpu, batch, block, source);
        }
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
