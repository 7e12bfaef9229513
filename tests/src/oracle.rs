//! What a log must end with: a naive reference that the engine is held against.
//!
//! Takes all records at once, sorts them by event time and looks at whole windows; it keeps no state between records
//! and may be slow. It shares thresholds, records and the catalogue with the processor, and no code that decides.
//! It knows nothing of arrival: a record counts as long as it came within the allowed lateness, and none comes twice.

mod ecc_rate;
mod ecc_uncorrectable;
mod feed_over_rating;
mod thermal_throttle;
mod xid;

use std::collections::BTreeSet;

use gpufleet_processor::detect::DetectorsConfig;
use gpufleet_schemas::metric::Metric;
use gpufleet_schemas::record::{GpuBatch, GpuBlock, Severity, Telemetry, Topology, XidEvent};

/// An incident that has a page of its own at the end of the log.
#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    pub kind: &'static str,
    /// Empty where the incident is about a feed.
    pub host: String,
    /// GPU uuid; of an Xid the slot, else the uuid, else nothing; the key of a feed.
    pub subject: String,
    pub code: Option<i32>,
    pub severity: Severity,
    pub onset_at: i64,
    /// None while open.
    pub end_at: Option<i64>,
    /// Kind and code of each incident attached to it, sorted.
    pub explains: Vec<(String, Option<i32>)>,
}

/// `records`: of all hosts, in any order; `until`: the watermark at the end, a whole second.
/// Sorted by kind, host, subject, code and onset.
pub fn expect(records: &[Telemetry], config: &DetectorsConfig, until: i64) -> Vec<Expected> {
    let log = Log::of(records, until);
    let mut entities = Vec::new();
    if config.xid.enabled {
        entities.extend(xid::entities(&log, config));
    }
    if config.ecc_uncorrectable.enabled {
        entities.extend(ecc_uncorrectable::entities(&log));
    }
    if config.ecc_rate.enabled {
        entities.extend(ecc_rate::entities(&log, config));
    }
    if config.thermal_throttle.enabled {
        entities.extend(thermal_throttle::entities(&log, config));
    }
    if config.feed_over_rating.enabled {
        entities.extend(feed_over_rating::entities(&log, config));
    }
    let incidents = entities.into_iter().flat_map(|entity| incidents(entity, config.engine.flap_guard)).collect();
    let mut expected: Vec<Expected> = pages(incidents, config.engine.cause_window).iter().map(Page::expected).collect();
    expected.sort_by(|a, b| {
        let key = |e: &Expected| (e.kind, e.host.clone(), e.subject.clone(), e.code, e.onset_at);
        key(a).cmp(&key(b))
    });
    expected
}

/// The records up to `until` by kind, each kind in the order of event time.
struct Log<'a> {
    batches: Vec<&'a GpuBatch>,
    events: Vec<&'a XidEvent>,
    topologies: Vec<&'a Topology>,
    until: i64,
}

impl<'a> Log<'a> {
    fn of(records: &'a [Telemetry], until: i64) -> Log<'a> {
        let mut log = Log { batches: Vec::new(), events: Vec::new(), topologies: Vec::new(), until };
        for record in records {
            match record {
                Telemetry::Batch(batch) => log.batches.push(batch),
                Telemetry::Event(event) => log.events.push(event),
                Telemetry::Topology(topology) => log.topologies.push(topology),
                Telemetry::Tick(_) => {}
            }
        }
        log.batches.retain(|batch| batch.origin.observed_at <= until);
        log.events.retain(|event| event.origin.observed_at <= until);
        log.topologies.retain(|topology| topology.epoch_at <= until);
        log.batches.sort_by_key(|batch| (batch.origin.observed_at, batch.origin.seq));
        log.events.sort_by_key(|event| (event.origin.observed_at, event.origin.seq));
        log.topologies.sort_by_key(|topology| topology.epoch_at);
        log
    }

    fn of_host(&self, host: &str) -> Vec<&'a GpuBatch> {
        self.batches.iter().copied().filter(|batch| batch.origin.host == host).collect()
    }

    fn hosts(&self) -> BTreeSet<&'a str> {
        self.batches.iter().copied().map(|batch| batch.origin.host.as_str()).collect()
    }

    /// Host and uuid of every GPU.
    fn gpus(&self) -> BTreeSet<(&'a str, &'a str)> {
        let mut gpus = BTreeSet::new();
        for batch in self.batches.iter().copied() {
            gpus.extend(batch.gpus.iter().map(|block| (batch.origin.host.as_str(), block.gpu_uuid.as_str())));
        }
        gpus
    }

    /// One GPU's part of each batch that has it.
    fn blocks(&self, host: &str, uuid: &str) -> Vec<(&'a GpuBatch, &'a GpuBlock)> {
        let mut blocks = Vec::new();
        for batch in self.of_host(host) {
            blocks.extend(batch.gpus.iter().filter(|block| block.gpu_uuid == uuid).map(|block| (batch, block)));
        }
        blocks
    }

    /// Instant and value of each reading of one metric of a GPU.
    fn readings(&self, host: &str, uuid: &str, metric: Metric) -> Vec<(i64, i64)> {
        let mut readings = Vec::new();
        for (batch, block) in self.blocks(host, uuid) {
            readings.extend(block.readings(metric).map(|(tick, value)| (batch.tick_at(tick), value)));
        }
        readings.retain(|(at, _)| *at <= self.until);
        readings.sort_by_key(|(at, _)| *at);
        readings
    }

    /// When the host's counters were zeroed: each batch whose boot or reset epoch is not that of the batch before.
    fn resets(&self, host: &str) -> Vec<i64> {
        let batches = self.of_host(host);
        let pairs = batches.windows(2).map(|pair| (&pair[0].origin, &pair[1].origin));
        pairs
            .filter(|(before, now)| {
                now.reset_epoch != before.reset_epoch || (now.boot_id != before.boot_id && !now.recorded())
            })
            .map(|(_, now)| now.observed_at)
            .collect()
    }

    /// The GPU that an event is about, as the host's batches show it. Assumes that no GPU changes its slot.
    fn gpu_of(&self, event: &XidEvent) -> Option<&'a GpuBlock> {
        let batches = self.of_host(&event.origin.host);
        let mut blocks = batches.into_iter().flat_map(|batch| batch.gpus.iter());
        match &event.gpu_uuid {
            Some(uuid) => blocks.find(|block| block.gpu_uuid == *uuid),
            None => blocks.find(|block| block.pci.is_some() && block.pci == event.pci),
        }
    }
}

/// What an incident is about.
#[derive(Clone, Debug)]
struct Who {
    kind: &'static str,
    host: String,
    subject: String,
    /// What names the GPU: its uuid where that is known.
    gpu: String,
    /// Of the class whose members explain one another.
    memory: bool,
}

/// A span in which a rule held.
#[derive(Clone, Debug)]
struct Episode {
    onset_at: i64,
    end_at: Option<i64>,
    /// When the condition of the end was met; none where it was not by the end of the log, or where the next episode of
    /// the entity came first, so that the incident never looked ended.
    resolved_at: Option<i64>,
    severity: Severity,
    code: Option<i32>,
}

/// One subject of one rule with everything that happened to it, in time order. An Xid's code is part of the subject.
struct Entity {
    who: Who,
    episodes: Vec<Episode>,
}

/// Episodes that are one incident.
struct Incident {
    who: Who,
    episodes: Vec<Episode>,
}

/// Gathers an entity's episodes: one that begins at most `flap_guard` after the end of the one before, or before that
/// one was over, belongs to the same incident.
fn incidents(entity: Entity, flap_guard: i64) -> Vec<Incident> {
    let mut incidents: Vec<Incident> = Vec::new();
    for episode in entity.episodes {
        match incidents.last_mut() {
            Some(incident)
                if incident.end_at().is_none_or(|end| episode.onset_at <= end.saturating_add(flap_guard)) =>
            {
                incident.episodes.push(episode);
            }
            _ => incidents.push(Incident { who: entity.who.clone(), episodes: vec![episode] }),
        }
    }
    incidents
}

impl Incident {
    fn onset_at(&self) -> i64 {
        self.episodes[0].onset_at
    }

    fn end_at(&self) -> Option<i64> {
        self.episodes[self.episodes.len() - 1].end_at
    }

    /// The first one known: "GPU is lost" and the plain "fallen off the bus" have none of their own.
    fn code(&self) -> Option<i32> {
        self.episodes.iter().find_map(|episode| episode.code)
    }

    fn severity(&self) -> Severity {
        self.episodes.iter().map(|episode| episode.severity).max().unwrap_or_default()
    }

    fn open_at(&self, at: i64) -> bool {
        let open = |e: &Episode| e.onset_at <= at && e.resolved_at.is_none_or(|resolved| resolved > at);
        self.episodes.iter().any(open)
    }
}

/// An incident and those that it explains.
struct Page {
    own: Incident,
    attached: Vec<Incident>,
}

impl Page {
    fn all(&self) -> impl Iterator<Item = &Incident> {
        std::iter::once(&self.own).chain(&self.attached)
    }

    fn explains(&self, other: &Incident, cause_window: i64) -> bool {
        let (a, b) = (&self.own.who, &other.who);
        let same_cause = a.memory && b.memory && (&a.host, &a.gpu) == (&b.host, &b.gpu);
        let onset_at = other.onset_at();
        same_cause
            && (onset_at - self.own.onset_at()).abs() <= cause_window
            && self.all().any(|incident| incident.open_at(onset_at))
    }

    fn expected(&self) -> Expected {
        let who = self.own.who.clone();
        let ends: Vec<Option<i64>> = self.all().map(Incident::end_at).collect();
        let end_at = if ends.contains(&None) { None } else { ends.into_iter().max().flatten() };
        let mut explains: Vec<(String, Option<i32>)> =
            self.attached.iter().map(|incident| (incident.who.kind.to_owned(), incident.code())).collect();
        explains.sort();
        Expected {
            kind: who.kind,
            host: who.host,
            subject: who.subject,
            code: self.own.code(),
            severity: self.all().map(Incident::severity).max().unwrap_or_default(),
            onset_at: self.own.onset_at(),
            end_at,
            explains,
        }
    }
}

/// One cause, one page. Incidents open in the order of their onset; at equal onset the kernel's word comes first.
///
/// Assumed at the corners: an incident's onset is that of its first episode, also when it was reopened since. Attached
/// once is attached for good: what reopens an attached incident begins within the flap guard of that incident's end, so
/// within that of the page's, which is never earlier. An incident that had a page before keeps it when it reopens.
/// A page is open while anything on it is.
fn pages(mut incidents: Vec<Incident>, cause_window: i64) -> Vec<Page> {
    incidents.sort_by_key(|incident| (incident.onset_at(), incident.who.kind != "xid", incident.code()));
    let mut pages: Vec<Page> = Vec::new();
    for incident in incidents {
        match pages.iter_mut().find(|page| page.explains(&incident, cause_window)) {
            Some(page) => page.attached.push(incident),
            None => pages.push(Page { own: incident, attached: Vec::new() }),
        }
    }
    pages
}
