//! The incident book: turns what detectors say again and again into the life of incidents.
//!
//! An incident opens at the first finding of its entity and kind, is revised when it gets worse, has grown by a power of
//! two or was dated anew, and resolves when its finding has an end. A new finding within the flap guard reopens it under
//! the same id. What another open incident of the same GPU has caused gets no page of its own: it is attached to that
//! one. What its detector no longer finds, because late records showed it otherwise, is withdrawn. Ids are hashes of
//! content, so a replay gives the same.

use std::collections::{BTreeMap, BTreeSet};

use gpufleet_schemas::record::{Explained, Incident, Severity, State};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::Finding;

/// What another version has said is taken back when this one has not found it so long after it was decided.
const TAKE_BACK_AFTER: i64 = 60_000_000;
/// Longest texts of an incident, bytes.
const LONGEST_SUMMARY: usize = 2_000;
const LONGEST_RAW: usize = 8_000;

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

/// The spans that the book goes by, microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spans {
    /// An incident that comes back within this span is the same incident.
    pub flap_guard: i64,
    /// Findings of one cause lie no further apart.
    pub cause_window: i64,
    /// So long after it was resolved an incident leaves the compacted topic.
    pub tombstone_after: i64,
}

/// What an incident is about: kind, who within which host, and the facet of it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Key {
    kind: String,
    who: String,
    facet: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Entry {
    /// The newest revision; of an attached one, what it would say.
    incident: Incident,
    /// Onset, end and severity of its newest episode alone, and the severity of those before.
    episode_at: i64,
    end_at: Option<i64>,
    severity: Severity,
    before: Severity,
    cause: Option<String>,
    /// When its detector last said that it goes on.
    heard_at: i64,
    /// The page that it is attached to.
    page: Option<Key>,
    attached: Vec<Key>,
}

/// The incidents of one task.
#[derive(Clone, Debug)]
pub struct Book {
    task: TaskId,
    spans: Spans,
    pages: Pages,
}

/// The book's state.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Pages {
    entries: BTreeMap<Key, Entry>,
    open: BTreeSet<Key>,
    /// Resolved incidents by when, for their tombstones.
    resolved: BTreeSet<(i64, String)>,
    /// What another version has said and this one has not come to yet.
    said: BTreeMap<String, Incident>,
}

impl Book {
    pub fn new(task: TaskId, spans: Spans) -> Book {
        Book { task, spans, pages: Pages::default() }
    }

    pub fn pages(&self) -> &Pages {
        &self.pages
    }

    pub fn restore(&mut self, pages: Pages) {
        self.pages = pages;
    }

    /// Goes on where another version has said this already: its revisions are not repeated, and what this version does
    /// not find is taken back.
    pub fn take_over(&mut self, said: Vec<Incident>) {
        for incident in said {
            let newest = self.pages.said.get(&incident.id).is_none_or(|before| before.revision < incident.revision);
            if newest {
                self.pages.said.insert(incident.id.clone(), incident);
            }
        }
    }

    /// How many incidents are open.
    pub fn open_count(&self) -> usize {
        self.pages.open.len()
    }

    /// Takes what a detector says at watermark `now`; gives the revision that it makes, if any. The task numbers it.
    pub fn record(&mut self, finding: Finding, now: i64) -> Option<Incident> {
        let who = format!("{}/{}", finding.entity.host, finding.subject);
        let key = Key { kind: finding.kind.to_owned(), who, facet: finding.facet.clone() };
        let (open, flap_guard) = (finding.end_at.is_none(), self.spans.flap_guard);
        let known = match self.pages.entries.get_mut(&key) {
            Some(entry) if !starts_anew(entry, &finding, flap_guard) => {
                if open {
                    entry.heard_at = now;
                }
                if !revise(entry, &finding) {
                    return None;
                }
                true
            }
            // What was over so long ago has had its tombstone.
            _ if finding.end_at.is_some_and(|end| end.saturating_add(self.spans.tombstone_after) <= now) => {
                return None;
            }
            _ => false,
        };
        if !known {
            self.open(&key, &finding, now);
        }
        if open {
            self.pages.open.insert(key.clone());
        } else {
            self.pages.open.remove(&key);
        }
        let entry = self.pages.entries.get_mut(&key)?;
        fill(&mut entry.incident, finding);
        let root = entry.page.clone().unwrap_or(key);
        self.emit(&root, now, known)
    }

    fn open(&mut self, key: &Key, finding: &Finding, now: i64) {
        let page = finding.cause.and_then(|cause| self.page_of(key, finding, cause));
        let incident = Incident {
            id: id_of(&self.task, key, finding.onset_at),
            kind: key.kind.clone(),
            onset_at: finding.onset_at,
            count: finding.count,
            late: finding.late,
            log_id: self.task.log_id.clone(),
            topic: self.task.topic.clone(),
            partition: self.task.partition,
            detector: format!("{}/{}", finding.kind, env!("CARGO_PKG_VERSION")),
            task: self.task.to_string(),
            ..Incident::default()
        };
        if let Some(page) = page.as_ref().and_then(|page| self.pages.entries.get_mut(page)) {
            page.attached.push(key.clone());
            page.incident.explains.push(Explained {
                kind: finding.kind.to_owned(),
                code: finding.code,
                onset_at: finding.onset_at,
                summary: bounded(finding.summary.clone(), LONGEST_SUMMARY),
            });
        }
        let entry = Entry {
            incident,
            episode_at: finding.onset_at,
            end_at: finding.end_at,
            severity: finding.severity,
            before: Severity::Unknown,
            cause: finding.cause.map(str::to_owned),
            heard_at: now,
            page,
            attached: Vec::new(),
        };
        if let Some(before) = self.pages.entries.insert(key.clone(), entry) {
            let page = before.page.filter(|page| page != key);
            if let Some(page) = page.and_then(|page| self.pages.entries.get_mut(&page)) {
                page.attached.retain(|follower| follower != key);
            }
            // Its followers are over with it, or else they would have kept it open.
            for follower in before.attached {
                if let Some(follower) = self.pages.entries.get_mut(&follower) {
                    follower.page = None;
                }
            }
        }
    }

    /// The open page of the same GPU and cause that the finding belongs to.
    fn page_of(&self, key: &Key, finding: &Finding, cause: &str) -> Option<Key> {
        let same_gpu = |other: &Incident| {
            other.host == finding.entity.host
                && match (&other.gpu_uuid, &finding.entity.gpu_uuid) {
                    (Some(a), Some(b)) => a == b,
                    _ => other.pci.is_some() && other.pci == finding.entity.pci,
                }
        };
        let fits = |other: &&Key| {
            self.pages.entries.get(*other).is_some_and(|entry| {
                entry.page.is_none()
                    && entry.cause.as_deref() == Some(cause)
                    && (entry.episode_at - finding.onset_at).abs() <= self.spans.cause_window
                    && same_gpu(&entry.incident)
            })
        };
        let onset_of = |other: &&Key| self.pages.entries.get(*other).map(|entry| entry.episode_at);
        self.pages.open.iter().filter(|other| *other != key).filter(fits).min_by_key(onset_of).cloned()
    }

    /// The next revision of a page, from its own episode and what is attached to it.
    fn emit(&mut self, root: &Key, now: i64, known: bool) -> Option<Incident> {
        let entry = self.pages.entries.get(root)?;
        let parts = std::iter::once(entry)
            .chain(entry.attached.iter().filter_map(|key| self.pages.entries.get(key)))
            .map(|entry| (entry.severity.max(entry.before), entry.end_at, entry.incident.onset_at));
        let (mut severity, mut end_at, mut onset_at) = (Severity::Unknown, Some(i64::MIN), i64::MAX);
        for (part, end, onset) in parts {
            severity = severity.max(part);
            onset_at = onset_at.min(onset);
            end_at = end_at.and_then(|so_far| end.map(|end| so_far.max(end)));
        }
        let entry = self.pages.entries.get_mut(root)?;
        let incident = &mut entry.incident;
        self.pages.resolved.retain(|(_, id)| *id != incident.id);
        if known || !entry.attached.is_empty() {
            incident.revision += 1;
        }
        if let Some(said) = self.pages.said.get(&incident.id) {
            incident.revision = incident.revision.max(said.revision + 1);
        }
        incident.severity = severity;
        incident.onset_at = onset_at;
        incident.end_at = end_at;
        incident.state = if end_at.is_some() { State::Resolved } else { State::Open };
        incident.decided_at = now;
        if end_at.is_some() {
            self.pages.resolved.insert((now, incident.id.clone()));
        }
        Some(incident.clone())
    }

    /// Withdraws what is open although its detector, if it `spoke` of all it sees at `now`, no longer finds it; and what
    /// another version has said and none of ours finds.
    pub fn withdraw(&mut self, now: i64, spoke: impl Fn(&str) -> bool, revisions: &mut Vec<Incident>) {
        let lost: Vec<Key> = self
            .pages
            .open
            .iter()
            .filter(|key| spoke(&key.kind))
            .filter(|key| self.pages.entries.get(*key).is_some_and(|entry| entry.heard_at < now))
            .cloned()
            .collect();
        for key in lost {
            self.pages.open.remove(&key);
            let Some(entry) = self.pages.entries.get_mut(&key) else { continue };
            entry.end_at = Some(entry.episode_at);
            take_back(&mut entry.incident);
            let root = entry.page.clone().unwrap_or(key);
            revisions.extend(self.emit(&root, now, true));
        }
        self.settle_what_was_said(now, revisions);
    }

    fn settle_what_was_said(&mut self, now: i64, revisions: &mut Vec<Incident>) {
        let due: Vec<String> = self
            .pages
            .said
            .values()
            .filter(|said| now > said.decided_at.saturating_add(TAKE_BACK_AFTER))
            .map(|said| said.id.clone())
            .collect();
        for id in due {
            let ours = self.pages.entries.iter().find(|(_, entry)| entry.page.is_none() && entry.incident.id == id);
            let ours = ours.map(|(key, entry)| (key.clone(), entry.incident.state, entry.incident.revision));
            match (ours, self.pages.said.get(&id)) {
                (Some((key, state, revision)), Some(said)) if revision <= said.revision && state != said.state => {
                    revisions.extend(self.emit(&key, now, true));
                }
                (Some((key, _, _)), Some(said)) => {
                    if let Some(entry) = self.pages.entries.get_mut(&key) {
                        entry.incident.revision = entry.incident.revision.max(said.revision);
                    }
                }
                (None, Some(said)) if said.state == State::Open => {
                    let mut incident = said.clone();
                    take_back(&mut incident);
                    incident.revision += 1;
                    incident.state = State::Resolved;
                    incident.end_at = Some(incident.onset_at);
                    incident.decided_at = now;
                    self.pages.resolved.insert((now, id.clone()));
                    revisions.push(incident);
                }
                _ => {}
            }
            self.pages.said.remove(&id);
        }
    }

    /// Forgets what was resolved long ago; gives the ids that may leave the compacted topic.
    pub fn sweep(&mut self, now: i64) -> Vec<String> {
        let mut ids = BTreeSet::new();
        while let Some((at, _)) = self.pages.resolved.first() {
            if at.saturating_add(self.spans.tombstone_after) > now {
                break;
            }
            ids.extend(self.pages.resolved.pop_first().map(|(_, id)| id));
        }
        if !ids.is_empty() {
            let gone = |key: &Key, entries: &BTreeMap<Key, Entry>| {
                entries.get(key).is_some_and(|entry| ids.contains(&entry.incident.id))
            };
            let keys: Vec<Key> = self
                .pages
                .entries
                .iter()
                .filter(|(key, entry)| match &entry.page {
                    Some(page) => gone(page, &self.pages.entries),
                    None => gone(key, &self.pages.entries),
                })
                .map(|(key, _)| key.clone())
                .collect();
            for key in keys {
                self.pages.entries.remove(&key);
                self.pages.open.remove(&key);
            }
        }
        ids.into_iter().collect()
    }
}

fn id_of(task: &TaskId, key: &Key, onset_at: i64) -> String {
    let mut hash = Sha256::new();
    for part in [&task.log_id, &key.kind, &key.who, &key.facet] {
        hash.update(part.as_bytes());
        hash.update([0]);
    }
    hash.update(onset_at.to_be_bytes());
    hash.finalize()[..10].iter().fold(String::with_capacity(20), |id, byte| id + &format!("{byte:02x}"))
}

/// A finding that is no revision of the entry but a new incident of the same entity.
fn starts_anew(entry: &Entry, finding: &Finding, flap_guard: i64) -> bool {
    entry.end_at.is_some_and(|end| finding.onset_at > end.saturating_add(flap_guard))
}

/// Brings the entry's life up to date; false when the finding says nothing new about it.
fn revise(entry: &mut Entry, finding: &Finding) -> bool {
    // An episode before the newest one was settled when it ended.
    if finding.end_at.is_some_and(|end| end < entry.episode_at) {
        return false;
    }
    let incident = &mut entry.incident;
    if entry.end_at.is_some_and(|end| finding.onset_at >= end && finding.onset_at > entry.episode_at) {
        entry.episode_at = finding.onset_at;
        entry.end_at = finding.end_at;
        entry.before = entry.before.max(entry.severity);
        entry.severity = finding.severity;
        incident.count += finding.count;
        return true;
    }
    // A detector never takes severity back within an episode, unless late records have shown it otherwise.
    let judged_anew = finding.severity != entry.severity;
    let grown = finding.count > incident.count && finding.count >= incident.count.saturating_mul(2);
    let dated_anew = finding.onset_at < entry.episode_at;
    if !judged_anew && !grown && !dated_anew && finding.end_at == entry.end_at {
        return false;
    }
    if dated_anew {
        if incident.onset_at == entry.episode_at {
            incident.onset_at = finding.onset_at;
        }
        entry.episode_at = finding.onset_at;
    }
    entry.severity = finding.severity;
    incident.count = incident.count.max(finding.count);
    incident.late |= finding.late;
    entry.end_at = finding.end_at;
    true
}

/// Cuts a text that a record has made too long to send on.
fn bounded(mut text: String, longest: usize) -> String {
    let end = (0..=longest.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    text.truncate(end.unwrap_or(0));
    text
}

fn take_back(incident: &mut Incident) {
    if !incident.summary.starts_with("withdrawn: ") {
        incident.summary.insert_str(0, "withdrawn: ");
    }
}

/// Puts what the detector has to tell into the incident.
fn fill(incident: &mut Incident, finding: Finding) {
    let Finding { entity, offsets, .. } = finding;
    incident.site = entity.site;
    incident.rack = entity.rack;
    incident.host = entity.host;
    incident.gpu_uuid = entity.gpu_uuid;
    incident.gpu_index = entity.gpu_index;
    incident.pci = entity.pci;
    incident.job_id = entity.job_id;
    incident.feed = entity.feed;
    incident.code = finding.code;
    finding.statistic.clone_into(&mut incident.statistic);
    incident.value = finding.value;
    incident.threshold = finding.threshold;
    incident.summary = bounded(finding.summary, LONGEST_SUMMARY);
    incident.actions = finding.actions;
    incident.evidence = finding.evidence;
    incident.coverage = finding.coverage;
    incident.raw = finding.raw.map(|raw| bounded(raw, LONGEST_RAW));
    incident.first_offset = offsets.first;
    incident.last_offset = offsets.last;
}

#[cfg(test)]
mod tests;
