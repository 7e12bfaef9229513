//! `xid`: the driver, or an NVSwitch, reported an error in the kernel log, or a GPU is gone.
//!
//! One incident per device and code: the first line opens it, repeats are counted. Severity and what to do come from the
//! catalogue (`schemas/data/xid_catalogue.tsv`); a code that the catalogue calls information opens nothing, and one that
//! it does not know is major, never dropped. An application's Xid resolves after a quiet time, a hardware Xid only after
//! a reset and a quiet time. An event is never too late.

use std::collections::{BTreeMap, BTreeSet};

use gpufleet_schemas::catalogue::{Advice, advice};
use gpufleet_schemas::record::{EventKind, Evidence, Severity, XidEvent};
use serde::{Deserialize, Serialize};

use super::config::XidConfig;
use super::{Detector, Source, precedence};
use crate::engine::finding::Offsets;
use crate::engine::{Entities, Entity, Finding, Fold, Reorder, Section, StateError};

/// Xid 79, the plain message and NVML's "GPU is lost" are one cause.
const OFF_THE_BUS: &str = "off the bus";

#[derive(Clone, Debug, Serialize, Deserialize)]
enum Fact {
    Event { facet: String, kind: EventKind, code: Option<i32>, message: String, raw: String, offset: i64, late: bool },
    Reset { number: u32 },
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Episode {
    kind: EventKind,
    code: Option<i32>,
    message: String,
    raw: String,
    first_at: i64,
    last_at: i64,
    reset_at: Option<i64>,
    count: i64,
    late: bool,
    offsets: Offsets,
}

/// The fold over one device's events: the newest episode of each code.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct State {
    episodes: BTreeMap<String, Episode>,
    /// Number of the newest reset.
    reset: Option<u32>,
}

impl Fold<Fact> for State {
    type Rule = XidConfig;

    fn step(&mut self, at: i64, fact: &Fact, rule: &XidConfig) {
        match fact {
            Fact::Reset { number } if self.reset >= Some(*number) => {}
            Fact::Reset { number } => {
                self.reset = Some(*number);
                for episode in self.episodes.values_mut().filter(|episode| episode.last_at < at) {
                    episode.reset_at.get_or_insert(at);
                }
            }
            Fact::Event { facet, kind, code, message, raw, offset, late } => {
                let fresh = Episode {
                    kind: *kind,
                    code: *code,
                    message: message.clone(),
                    raw: raw.clone(),
                    first_at: at,
                    last_at: at,
                    reset_at: None,
                    count: 0,
                    late: *late,
                    offsets: Offsets::default(),
                };
                let episode = self.episodes.entry(facet.clone()).or_insert_with(|| fresh.clone());
                let over = episode.reset_at.is_some_and(|reset| reset < at)
                    || (episode.is_application() && at - episode.last_at >= rule.application_quiet);
                if over {
                    *episode = fresh;
                }
                episode.first_at = episode.first_at.min(at);
                episode.last_at = episode.last_at.max(at);
                episode.code = episode.code.or(*code);
                episode.count += 1;
                episode.offsets.include(*offset);
            }
        }
    }
}

impl Episode {
    fn advice(&self) -> Advice {
        advice(self.kind, self.code, &self.message)
    }

    /// Blames a process, not the device.
    fn is_application(&self) -> bool {
        self.advice().severity <= Severity::Warning
    }

    fn end_at(&self, now: i64, config: &XidConfig) -> Option<i64> {
        if self.is_application() {
            (now - self.last_at >= config.application_quiet).then_some(self.last_at)
        } else {
            self.reset_at.filter(|reset| now - reset >= config.hardware_quiet)
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Device {
    entity: Entity,
    fold: Reorder<Fact, State>,
}

/// The detector.
pub struct Xid {
    config: XidConfig,
    known: Known,
}

/// Its state.
#[derive(Default, Serialize, Deserialize)]
struct Known {
    devices: BTreeMap<(String, String), Device>,
    active: BTreeSet<(String, String)>,
    floor: Option<i64>,
}

impl Xid {
    pub fn new(config: &XidConfig) -> Xid {
        Xid { config: config.clone(), known: Known::default() }
    }
}

fn facet(event: &XidEvent) -> String {
    match (event.kind, event.code) {
        (EventKind::Xid, Some(79)) | (EventKind::FellOff | EventKind::GpuLost, _) => OFF_THE_BUS.to_owned(),
        (kind, Some(code)) => format!("{kind} {code}"),
        (kind, None) => kind.as_str().to_owned(),
    }
}

impl Detector for Xid {
    fn kind(&self) -> &'static str {
        "xid"
    }

    fn reset(&mut self, host: &str, at: i64, number: u32, source: Source) {
        let of_host =
            self.known.devices.range_mut((host.to_owned(), String::new())..).take_while(|((name, _), _)| name == host);
        for (_, device) in of_host {
            device.fold.insert(at, source.seq, 0, Fact::Reset { number });
        }
    }

    fn event(&mut self, event: &XidEvent, entity: &Entity, source: Source) {
        if advice(event.kind, event.code, &event.message).severity <= Severity::Info {
            return;
        }
        let device = entity.pci.clone().or_else(|| entity.gpu_uuid.clone()).unwrap_or_default();
        let key = (event.origin.host.clone(), device);
        let at = event.origin.observed_at;
        let late = self.known.floor.is_some_and(|floor| at <= floor);
        let fact = Fact::Event {
            facet: facet(event),
            kind: event.kind,
            code: event.code,
            message: event.message.clone(),
            raw: event.raw.clone(),
            offset: source.offset,
            late,
        };
        let device = self
            .known
            .devices
            .entry(key.clone())
            .or_insert_with(|| Device { entity: entity.clone(), fold: Reorder::default() });
        device.entity = entity.clone();
        if late {
            device.fold.insert_late(at, &fact, &self.config);
        } else {
            device.fold.insert(at, source.seq, 1, fact);
        }
        self.known.active.insert(key);
    }

    fn advance(&mut self, now: i64, floor: i64, _: &Entities, findings: &mut Vec<Finding>) -> bool {
        let Known { devices, active, floor: known_floor } = &mut self.known;
        let config = &self.config;
        *known_floor = Some(floor);
        active.retain(|key| {
            let Some(device) = devices.get_mut(key) else { return false };
            device.fold.settle(floor, config);
            let present = device.fold.present(now, config);
            let mut goes_on = device.fold.waits();
            for (facet, episode) in &present.episodes {
                let end_at = episode.end_at(now, config);
                goes_on |= end_at.is_none();
                findings.push(finding(&key.1, facet, episode, end_at, &device.entity));
            }
            device.fold.settled_mut().episodes.retain(|_, episode| episode.end_at(floor, config).is_none());
            goes_on
        });
        true
    }

    fn save(&self) -> Section {
        Section::of(self.kind(), 1, &self.known)
    }

    fn load(&mut self, section: &Section) -> Result<(), StateError> {
        self.known = section.read(1)?;
        Ok(())
    }
}

fn finding(subject: &str, facet: &str, episode: &Episode, end_at: Option<i64>, entity: &Entity) -> Finding {
    let advice = episode.advice();
    let what = match episode.code {
        Some(code) => {
            format!("{} {code} ({})", if episode.kind == EventKind::Sxid { "SXid" } else { "Xid" }, advice.name)
        }
        None => advice.name.to_owned(),
    };
    let times = if episode.count > 1 { format!(" ({} times)", episode.count) } else { String::new() };
    Finding {
        kind: "xid",
        cause: (episode.kind == EventKind::Xid).then(|| precedence::cause("xid", episode.code)).flatten(),
        subject: subject.to_owned(),
        facet: facet.to_owned(),
        severity: advice.severity,
        onset_at: episode.first_at,
        end_at,
        late: episode.late,
        code: episode.code,
        statistic: "events of this code",
        value: episode.count as f64,
        threshold: 0.0,
        count: episode.count,
        summary: format!("{}: {what}: {}{times}", entity.text(), episode.message),
        actions: advice.ladder,
        evidence: vec![Evidence {
            at: episode.first_at,
            name: facet.to_owned(),
            value: episode.count,
            before: None,
            reset: false,
        }],
        coverage: None,
        raw: Some(episode.raw.clone()),
        offsets: episode.offsets,
        entity: entity.clone(),
    }
}
