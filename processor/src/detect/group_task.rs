//! A task of stage 2: a pure function of one partition of the partials topic, for what no single host shows.
//!
//! Its time is the lowest watermark of the tasks of stage 1, which they write into every partition. Each upstream task
//! numbers what it sends, so that what comes twice is dropped. A task that is silent for long is excluded by a record of
//! this task's own, which takes effect when it is read back: a replay does the same.

use std::collections::{BTreeMap, BTreeSet};

use gpufleet_schemas::instant::SECOND;
use gpufleet_schemas::record::{Exclusion, Group, GroupKind, Incident, Upstream};
use gpufleet_schemas::wire::Decoder;
use serde::{Deserialize, Serialize};

use super::coverage_gap::CoverageGap;
use super::feed_over_rating::FeedOverRating;
use super::task::Counts;
use super::{Detector, DetectorsConfig};
use crate::engine::book::{Pages, TaskId};
use crate::engine::machine::{numbers_of_next_version, section};
use crate::engine::{Book, Entities, Finding, Input, Machine, Output, Section, StateError};

/// A pane that stage 1 revises at its last moment is sent a little after that moment.
const UPSTREAM_DELAY: i64 = 10 * SECOND;
/// Format of the section `task`.
const FORMAT: u32 = 1;

/// What is known of a task of stage 1.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Upstreamer {
    /// Newest number; anything up to it was seen.
    emit_seq: Option<i64>,
    watermark_at: Option<i64>,
    /// When the log last heard of it.
    heard_at: Option<i64>,
    excluded: bool,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Seen {
    upstream: BTreeMap<String, Upstreamer>,
    /// Exclusions that were sent and not read back yet.
    excluding: BTreeSet<String>,
    /// When the newest record was appended.
    log_at: Option<i64>,
    topology_at: Option<i64>,
    groups: BTreeMap<(String, String), Group>,
    advanced_to: Option<i64>,
    counts: Counts,
    emit_seq: i64,
}

/// Detection over one partition of the partials.
pub struct GroupTask {
    id: TaskId,
    name: String,
    decoder: Decoder,
    lateness: i64,
    exclude_after: i64,
    seen: Seen,
    feeds: Option<FeedOverRating>,
    coverage: Option<CoverageGap>,
    book: Book,
    findings: Vec<Finding>,
}

impl GroupTask {
    /// `upstream` names the tasks of stage 1 that this one waits for.
    pub fn new(id: TaskId, upstream: impl IntoIterator<Item = String>, config: &DetectorsConfig) -> GroupTask {
        let fresh = Upstreamer { emit_seq: None, watermark_at: None, heard_at: None, excluded: false };
        let upstream = upstream.into_iter().map(|task| (task, fresh.clone())).collect();
        GroupTask {
            name: id.to_string(),
            decoder: Decoder::default(),
            lateness: config.engine.allowed_lateness + UPSTREAM_DELAY,
            exclude_after: config.engine.exclude_after,
            seen: Seen { upstream, ..Seen::default() },
            feeds: config.feed_over_rating.enabled.then(|| FeedOverRating::new(&config.feed_over_rating)),
            coverage: config.coverage_gap.enabled.then(|| CoverageGap::new(&config.coverage_gap, &id)),
            book: Book::new(id.clone(), config.engine.spans()),
            findings: Vec::new(),
            id,
        }
    }

    pub fn counts(&self) -> Counts {
        Counts { too_late: self.feeds.as_ref().map_or(0, FeedOverRating::too_late), ..self.seen.counts }
    }

    pub fn open_count(&self) -> usize {
        self.book.open_count()
    }

    /// Takes a record that is decoded already, as stage 1 gives it in the same process.
    pub fn take(&mut self, offset: i64, appended_at: Option<i64>, record: &Upstream, outputs: &mut Vec<Output>) {
        self.seen.counts.records += 1;
        self.looked_at(offset, false);
        match record {
            Upstream::Exclusion(exclusion) => self.exclude(exclusion),
            Upstream::Partial(partial) => {
                if self.is_new(&partial.task, partial.emit_seq, appended_at)
                    && partial.group == GroupKind::PowerDomain
                    && let Some(feeds) = &mut self.feeds
                {
                    feeds.partial(partial, offset);
                }
            }
            Upstream::Watermark(watermark) => {
                if self.is_new(&watermark.task, watermark.emit_seq, appended_at)
                    && let Some(task) = self.seen.upstream.get_mut(&watermark.task)
                {
                    task.watermark_at = task.watermark_at.max(Some(watermark.watermark_at));
                }
            }
            Upstream::Topology { task, emit_seq, topology } => {
                if self.is_new(task, *emit_seq, appended_at) && self.seen.topology_at <= Some(topology.epoch_at) {
                    self.seen.topology_at = Some(topology.epoch_at);
                    let key = |group: &Group| (group.kind.as_str().to_owned(), group.key.clone());
                    self.seen.groups = topology.groups.iter().map(|group| (key(group), group.clone())).collect();
                }
            }
        }
        self.look_for_silence(appended_at, outputs);
        self.advance(outputs);
    }

    /// The tasks of stage 1 are those of the configuration, whatever a snapshot knows.
    fn load_seen(&mut self, sections: &[Section]) -> Result<(), StateError> {
        let mut seen: Seen = section(sections, "task")?.read(FORMAT)?;
        seen.upstream.retain(|task, _| self.seen.upstream.contains_key(task));
        for (task, fresh) in std::mem::take(&mut self.seen.upstream) {
            seen.upstream.entry(task).or_insert(fresh);
        }
        self.seen = seen;
        Ok(())
    }

    fn looked_at(&mut self, offset: i64, undecodable: bool) {
        if let Some(coverage) = &mut self.coverage {
            coverage.looked_at(offset, undecodable);
        }
    }

    /// Drops what the upstream task has sent before; a task that speaks is waited for again.
    fn is_new(&mut self, task: &str, emit_seq: i64, appended_at: Option<i64>) -> bool {
        let Some(known) = self.seen.upstream.get_mut(task) else {
            // Of another log, or of a partition that the configuration does not know.
            self.seen.counts.undecodable += 1;
            return false;
        };
        known.heard_at = known.heard_at.max(appended_at);
        known.excluded = false;
        self.seen.excluding.remove(task);
        if known.emit_seq.is_some_and(|newest| emit_seq <= newest) {
            self.seen.counts.duplicates += 1;
            return false;
        }
        known.emit_seq = Some(emit_seq);
        true
    }

    fn exclude(&mut self, exclusion: &Exclusion) {
        self.seen.excluding.remove(&exclusion.excluded);
        if let Some(task) = self.seen.upstream.get_mut(&exclusion.excluded)
            && task.watermark_at.is_none_or(|at| at <= exclusion.watermark_at)
        {
            task.excluded = true;
        }
    }

    /// Asks to go on without the tasks that the log has not heard of for too long, while it heard of others.
    fn look_for_silence(&mut self, appended_at: Option<i64>, outputs: &mut Vec<Output>) {
        let Some(now) = appended_at else { return };
        // While the whole log stood still, nobody was silent.
        let stood_still = self.seen.log_at.map_or(0, |before| now.saturating_sub(before));
        self.seen.log_at = self.seen.log_at.max(appended_at);
        if stood_still > self.exclude_after / 2 {
            let heard = self.seen.upstream.values_mut().filter_map(|task| task.heard_at.as_mut());
            heard.for_each(|heard_at| *heard_at = heard_at.saturating_add(stood_still));
        }
        for (name, task) in &mut self.seen.upstream {
            let heard_at = *task.heard_at.get_or_insert(now);
            if task.excluded || now.saturating_sub(heard_at) <= self.exclude_after || self.seen.excluding.contains(name)
            {
                continue;
            }
            let exclusion = Exclusion {
                task: self.name.clone(),
                emit_seq: self.seen.emit_seq,
                excluded: name.clone(),
                watermark_at: task.watermark_at.unwrap_or(i64::MIN),
            };
            self.seen.emit_seq += 1;
            self.seen.excluding.insert(name.clone());
            outputs.push(Output::Itself(Upstream::Exclusion(exclusion)));
        }
    }

    /// The lowest watermark of those that are waited for; none while one of them has not spoken yet.
    fn watermark(&self) -> Option<i64> {
        let waited = self.seen.upstream.values().filter(|task| !task.excluded);
        waited.map(|task| task.watermark_at).min().flatten()
    }

    fn advance(&mut self, outputs: &mut Vec<Output>) {
        let Some(now) = self.watermark() else { return };
        if self.seen.advanced_to.is_some_and(|before| now <= before) {
            return;
        }
        self.seen.advanced_to = Some(now);
        if let Some(feeds) = &mut self.feeds {
            feeds.advance(now, now.saturating_sub(self.lateness), &self.seen.groups, &mut self.findings);
        }
        if let Some(coverage) = &mut self.coverage {
            coverage.advance(now, now.saturating_sub(self.lateness), &Entities::default(), &mut self.findings);
        }
        let mut revisions = Vec::new();
        for finding in self.findings.drain(..) {
            revisions.extend(self.book.record(finding, now));
        }
        self.book.withdraw(now, |_| true, &mut revisions);
        for mut incident in revisions {
            incident.emit_seq = self.seen.emit_seq;
            self.seen.emit_seq += 1;
            outputs.push(Output::Incident(Box::new(incident)));
        }
        outputs.extend(self.book.sweep(now).into_iter().map(|id| Output::Tombstone { id }));
    }
}

impl Machine for GroupTask {
    fn id(&self) -> &TaskId {
        &self.id
    }

    fn step(&mut self, input: Input<'_>, outputs: &mut Vec<Output>) {
        match self.decoder.upstream(input.payload) {
            Ok(record) => self.take(input.offset, input.appended_at, &record, outputs),
            Err(_) => {
                self.seen.counts.records += 1;
                self.seen.counts.undecodable += 1;
                self.looked_at(input.offset, true);
            }
        }
    }

    fn gap(&mut self, from: i64, to: i64) {
        if let Some(coverage) = &mut self.coverage {
            coverage.gap(from, to);
        }
    }

    fn save(&self) -> Vec<Section> {
        let mut sections =
            vec![Section::of("task", FORMAT, &self.seen), Section::of("book", FORMAT, self.book.pages())];
        sections.extend(self.feeds.as_ref().map(FeedOverRating::save));
        sections.extend(self.coverage.as_ref().map(Detector::save));
        sections
    }

    fn load(&mut self, sections: &[Section]) -> Result<(), StateError> {
        self.load_seen(sections)?;
        self.book.restore(section(sections, "book")?.read::<Pages>(FORMAT)?);
        if let Some(feeds) = &mut self.feeds {
            feeds.load(section(sections, "feed_over_rating")?)?;
        }
        if let Some(coverage) = &mut self.coverage {
            coverage.load(section(sections, "coverage_gap")?)?;
        }
        Ok(())
    }

    fn start_anew(&mut self, said: Vec<Incident>) {
        self.seen.emit_seq = numbers_of_next_version(self.seen.emit_seq, &said);
        self.book.take_over(said);
    }

    fn take_over(&mut self, sections: &[Section]) -> Result<(), StateError> {
        self.load_seen(sections)?;
        self.book.restore(section(sections, "book")?.read::<Pages>(FORMAT)?);
        if let (Some(feeds), Ok(section)) = (&mut self.feeds, section(sections, "feed_over_rating")) {
            // A detector that keeps its state otherwise now starts afresh.
            let _ = feeds.load(section);
        }
        if let (Some(coverage), Ok(section)) = (&mut self.coverage, section(sections, "coverage_gap")) {
            let _ = coverage.load(section);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
