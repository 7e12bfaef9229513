//! `xid`: events of one device and code, cut into episodes where a reset or a quiet time lies between two of them.
//!
//! An application's Xid (warning or less) is over after its quiet time, any other one after a reset and its quiet time.
//! Decisions fall at whole seconds: an event up to that second still belongs to what was open.

use std::collections::BTreeMap;

use gpufleet_processor::detect::DetectorsConfig;
use gpufleet_schemas::catalogue::advice;
use gpufleet_schemas::instant::SECOND;
use gpufleet_schemas::record::{EventKind, Severity, XidEvent};

use super::{Entity, Episode, Log, Who};

/// Codes that are one cause with uncorrectable memory errors.
const MEMORY: [i32; 5] = [48, 63, 64, 94, 95];

pub(super) fn entities(log: &Log<'_>, config: &DetectorsConfig) -> Vec<Entity> {
    let mut devices: BTreeMap<(String, String, String), Vec<&XidEvent>> = BTreeMap::new();
    for event in log.events.iter().copied() {
        if advice(event.kind, event.code, &event.message).severity > Severity::Info {
            devices.entry((event.origin.host.clone(), subject(log, event), what(event))).or_default().push(event);
        }
    }
    devices
        .into_iter()
        .map(|((host, subject, _), events)| {
            let first = events[0];
            let known = log.gpu_of(first).map(|block| block.gpu_uuid.clone());
            let gpu = known.or_else(|| first.gpu_uuid.clone()).unwrap_or_else(|| subject.clone());
            let memory = first.kind == EventKind::Xid && first.code.is_some_and(|code| MEMORY.contains(&code));
            let episodes = episodes(&events, &log.resets(&host), config, log.until);
            Entity { who: Who { kind: "xid", host, subject, gpu, memory }, episodes }
        })
        .collect()
}

/// The slot, else the uuid, else nothing.
fn subject(log: &Log<'_>, event: &XidEvent) -> String {
    let slot = log.gpu_of(event).and_then(|block| block.pci.clone());
    slot.or_else(|| event.pci.clone()).or_else(|| event.gpu_uuid.clone()).unwrap_or_default()
}

/// Which events of a device are the same trouble.
fn what(event: &XidEvent) -> String {
    match (event.kind, event.code) {
        (EventKind::Xid, Some(79)) | (EventKind::FellOff | EventKind::GpuLost, _) => "gone".to_owned(),
        (kind, code) => format!("{kind} {code:?}"),
    }
}

fn episodes(events: &[&XidEvent], resets: &[i64], config: &DetectorsConfig, until: i64) -> Vec<Episode> {
    let mut episodes = Vec::new();
    let mut rest = events;
    while let Some(first) = rest.first() {
        let at = |i: usize| rest[i].origin.observed_at;
        let application = advice(first.kind, first.code, &first.message).severity <= Severity::Warning;
        let parts = |i: usize| {
            let reset = resets.iter().any(|reset| at(i - 1) < *reset && *reset < at(i));
            reset || (application && at(i) - at(i - 1) >= config.xid.application_quiet)
        };
        let count = (1..rest.len()).find(|i| parts(*i)).unwrap_or(rest.len());
        let last_at = at(count - 1);
        let next_at = rest.get(count).map(|event| event.origin.observed_at);
        // Where the episode ends, and when that is certain.
        let ends = if application {
            Some((last_at, last_at + config.xid.application_quiet))
        } else {
            let reset = resets.iter().copied().find(|reset| last_at < *reset);
            reset.map(|reset| (reset, reset + config.xid.hardware_quiet))
        };
        let ends = ends.map(|(end, certain)| (end, whole_second(certain)));
        let ends = ends.filter(|(_, certain)| *certain <= until && next_at.is_none_or(|next| next > *certain));
        episodes.push(Episode {
            onset_at: at(0),
            end_at: ends.map(|(end, _)| end),
            resolved_at: ends.map(|(_, certain)| certain),
            severity: advice(first.kind, first.code, &first.message).severity,
            code: rest[..count].iter().find_map(|event| event.code),
        });
        rest = &rest[count..];
    }
    episodes
}

/// The first whole second that is not before `at`.
fn whole_second(at: i64) -> i64 {
    (at + SECOND - 1).div_euclid(SECOND) * SECOND
}
