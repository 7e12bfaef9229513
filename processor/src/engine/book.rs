//! The incident book: turns what detectors say again and again into the life of incidents.
//!
//! An incident opens at the first finding of its entity and kind, is revised when it gets worse or has grown by a power
//! of two, and resolves when its finding has an end. A new finding within the flap guard reopens it under the same id.
//! Ids are hashes of content, so a replay gives the same.

use std::collections::BTreeMap;

use gpufleet_schemas::record::{Incident, Severity, State};
use sha2::{Digest, Sha256};

use super::Finding;

/// Which log and partition a task reads.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TaskId {
    pub log_id: String,
    pub topic: String,
    pub partition: i32,
}

impl std::fmt::Display for TaskId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}/{}", self.log_id, self.topic, self.partition)
    }
}

#[derive(Clone, Debug)]
struct Entry {
    id: String,
    revision: i32,
    /// Onset of the incident: of its first episode.
    onset_at: i64,
    /// Onset of its newest episode.
    episode_at: i64,
    end_at: Option<i64>,
    severity: Severity,
    count: i64,
    late: bool,
}

/// The incidents of one task.
#[derive(Clone, Debug)]
pub struct Book {
    task: TaskId,
    flap_guard: i64,
    detector_version: &'static str,
    entries: BTreeMap<(&'static str, String, String), Entry>,
    emit_seq: i64,
}

impl Book {
    /// Reopens an incident that ended less than `flap_guard` microseconds before.
    pub fn new(task: TaskId, flap_guard: i64) -> Book {
        Book { task, flap_guard, detector_version: env!("CARGO_PKG_VERSION"), entries: BTreeMap::new(), emit_seq: 0 }
    }

    /// Takes what a detector says at watermark `now`; gives the revision that it makes, if any.
    pub fn record(&mut self, finding: Finding, now: i64) -> Option<Incident> {
        let key = (finding.kind, format!("{}/{}", finding.entity.host, finding.subject), finding.facet.clone());
        let entry = match self.entries.get_mut(&key) {
            Some(entry) => {
                if !revise(entry, &finding, self.flap_guard) {
                    if starts_anew(entry, &finding, self.flap_guard) {
                        *entry = open(&self.task, &key, &finding);
                    } else {
                        return None;
                    }
                }
                entry
            }
            None => {
                let opened = open(&self.task, &key, &finding);
                self.entries.entry(key).or_insert(opened)
            }
        };
        let emit_seq = self.emit_seq;
        self.emit_seq += 1;
        Some(incident(entry, finding, &self.task, self.detector_version, now, emit_seq))
    }

    /// How many incidents are open.
    pub fn open_count(&self) -> usize {
        self.entries.values().filter(|entry| entry.end_at.is_none()).count()
    }
}

fn open(task: &TaskId, key: &(&'static str, String, String), finding: &Finding) -> Entry {
    let mut hash = Sha256::new();
    for part in [&task.log_id, key.0, &key.1, &key.2] {
        hash.update(part.as_bytes());
        hash.update([0]);
    }
    hash.update(finding.onset_at.to_be_bytes());
    let id = hash.finalize()[..10].iter().fold(String::with_capacity(20), |id, byte| id + &format!("{byte:02x}"));
    Entry {
        id,
        revision: 0,
        onset_at: finding.onset_at,
        episode_at: finding.onset_at,
        end_at: finding.end_at,
        severity: finding.severity,
        count: finding.count,
        late: finding.late,
    }
}

/// A finding that is no revision of the entry but a new incident of the same entity.
fn starts_anew(entry: &Entry, finding: &Finding, flap_guard: i64) -> bool {
    entry.end_at.is_some_and(|end| finding.onset_at > end.saturating_add(flap_guard))
}

/// Brings the entry up to date; false when the finding says nothing new about it.
fn revise(entry: &mut Entry, finding: &Finding, flap_guard: i64) -> bool {
    // An episode before the newest one was settled when it ended.
    if finding.end_at.is_some_and(|end| end < entry.episode_at) || starts_anew(entry, finding, flap_guard) {
        return false;
    }
    if entry.end_at.is_some_and(|end| finding.onset_at > end) {
        entry.episode_at = finding.onset_at;
        entry.end_at = finding.end_at;
        entry.count += finding.count;
        entry.severity = entry.severity.max(finding.severity);
        entry.revision += 1;
        return true;
    }
    let worse = finding.severity > entry.severity;
    let grown = finding.count >= entry.count.saturating_mul(2).max(entry.count + 1) && finding.count > entry.count;
    if !worse && !grown && finding.end_at == entry.end_at {
        return false;
    }
    entry.severity = entry.severity.max(finding.severity);
    entry.count = entry.count.max(finding.count);
    entry.end_at = finding.end_at;
    entry.late |= finding.late;
    entry.revision += 1;
    true
}

fn incident(entry: &Entry, finding: Finding, task: &TaskId, version: &str, now: i64, emit_seq: i64) -> Incident {
    let Finding { kind, entity, code, statistic, value, threshold, summary, actions, evidence, raw, offsets, .. } =
        finding;
    Incident {
        id: entry.id.clone(),
        revision: entry.revision,
        kind: kind.to_owned(),
        state: if entry.end_at.is_some() { State::Resolved } else { State::Open },
        severity: entry.severity,
        site: entity.site,
        rack: entity.rack,
        host: entity.host,
        gpu_uuid: entity.gpu_uuid,
        gpu_index: entity.gpu_index,
        pci: entity.pci,
        job_id: entity.job_id,
        code,
        onset_at: entry.onset_at,
        end_at: entry.end_at,
        decided_at: now,
        late: entry.late,
        statistic: statistic.to_owned(),
        value,
        threshold,
        count: entry.count,
        summary,
        actions,
        evidence,
        raw,
        log_id: task.log_id.clone(),
        topic: task.topic.clone(),
        partition: task.partition,
        first_offset: offsets.first,
        last_offset: offsets.last,
        detector: format!("{kind}/{version}"),
        task: task.to_string(),
        emit_seq,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Entity;

    fn finding(onset_at: i64, end_at: Option<i64>, severity: Severity, count: i64) -> Finding {
        Finding {
            kind: "thermal_throttle",
            subject: "GPU-1".into(),
            facet: String::new(),
            entity: Entity { host: "node".into(), gpu_uuid: Some("GPU-1".into()), ..Entity::default() },
            severity,
            onset_at,
            end_at,
            late: false,
            code: None,
            statistic: "",
            value: 0.0,
            threshold: 0.0,
            count,
            summary: String::new(),
            actions: Vec::new(),
            evidence: Vec::new(),
            raw: None,
            offsets: crate::engine::finding::Offsets::default(),
        }
    }

    fn book() -> Book {
        Book::new(TaskId { log_id: "l".into(), topic: "t".into(), partition: 0 }, 30)
    }

    #[test]
    fn an_incident_opens_gets_worse_and_resolves_and_repeats_say_nothing() {
        let mut book = book();
        let opened = book.record(finding(10, None, Severity::Warning, 1), 11).expect("opens");
        assert_eq!((opened.revision, opened.state, opened.emit_seq), (0, State::Open, 0));
        assert!(book.record(finding(10, None, Severity::Warning, 1), 12).is_none());
        let worse = book.record(finding(10, None, Severity::Critical, 1), 13).expect("worse");
        assert_eq!((&worse.id, worse.revision, worse.severity), (&opened.id, 1, Severity::Critical));
        assert!(book.record(finding(10, None, Severity::Warning, 1), 14).is_none(), "severity never falls while open");
        let resolved = book.record(finding(10, Some(20), Severity::Warning, 1), 50).expect("resolves");
        assert_eq!(
            (resolved.state, resolved.end_at, resolved.severity),
            (State::Resolved, Some(20), Severity::Critical)
        );
        assert!(book.record(finding(10, Some(20), Severity::Warning, 1), 60).is_none());
    }

    #[test]
    fn a_relapse_within_the_flap_guard_reopens_and_a_later_one_is_a_new_incident() {
        let mut book = book();
        let first = book.record(finding(10, None, Severity::Warning, 1), 11).expect("opens");
        book.record(finding(10, Some(20), Severity::Warning, 1), 30).expect("resolves");
        let again = book.record(finding(40, None, Severity::Warning, 1), 41).expect("reopens");
        assert_eq!((&again.id, again.onset_at, again.revision, again.state), (&first.id, 10, 2, State::Open));
        assert!(book.record(finding(10, Some(20), Severity::Warning, 1), 42).is_none(), "the old episode is over");
        book.record(finding(40, Some(50), Severity::Warning, 1), 60).expect("resolves again");
        let new = book.record(finding(81, None, Severity::Warning, 1), 82).expect("opens");
        assert!(new.id != first.id && new.revision == 0);
    }

    #[test]
    fn a_storm_is_revised_by_powers_of_two() {
        let mut book = book();
        let revisions = (1..=1000)
            .filter(|count| book.record(finding(10, None, Severity::Major, *count), 10 + count).is_some())
            .count();
        assert_eq!(revisions, 10, "1, 2, 4, .. 512");
    }
}
