//! `feed_over_rating`: the hosts of a power domain draw more than the domain is rated for.
//!
//! Stage 2: the load of a pane is the sum of what its hosts draw, each by its mean over the seconds in which it was read.
//! Hosts that were not heard are missing in the sum, which is then a lower bound: it can still open an incident, but an
//! incident resolves only on panes in which enough of the expected hosts were heard (law L12).

use std::collections::BTreeMap;

use gpufleet_schemas::instant::SECOND;
use gpufleet_schemas::record::{Evidence, Group, GroupKind, Partial, Severity};
use serde::{Deserialize, Serialize};

use super::config::FeedOverRatingConfig;
use crate::engine::finding::Offsets;
use crate::engine::{Entity, Finding, Section, StateError};

/// What the hosts of a feed drew in a pane: mean milliwatts by host.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Pane {
    hosts: BTreeMap<String, i64>,
    offsets: Offsets,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Episode {
    onset_at: i64,
    end_at: Option<i64>,
    worst: Judged,
}

/// A pane against the rating.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Judged {
    at: i64,
    milliwatts: i64,
    rating_watts: i64,
    share: f64,
    coverage: f64,
    offsets: Offsets,
}

/// The fold over a feed's panes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct State {
    /// The run of panes over the rating, and of clear ones.
    over: Vec<Judged>,
    clear: Option<(i64, u32)>,
    open: Option<Episode>,
    /// The worst pane since the clearing run began, which counts only if the episode goes on.
    worst_since: Option<Judged>,
    closed: Option<Episode>,
}

#[derive(Default, Serialize, Deserialize)]
struct Feed {
    panes: BTreeMap<i64, Pane>,
    settled: State,
    settled_to: Option<i64>,
}

#[derive(Default, Serialize, Deserialize)]
struct Known {
    feeds: BTreeMap<String, Feed>,
    floor: Option<i64>,
    too_late: u64,
}

/// The detector.
pub struct FeedOverRating {
    config: FeedOverRatingConfig,
    known: Known,
}

fn worse(a: Judged, b: Judged) -> Judged {
    if b.share > a.share { b } else { a }
}

impl State {
    /// The pane that starts at `at`; none was read when `judged` is none.
    fn pane(&mut self, at: i64, judged: Option<Judged>, config: &FeedOverRatingConfig) {
        let Some(judged) = judged else {
            self.over.clear();
            self.go_on();
            return;
        };
        let is_clear = judged.share < config.clear_share && judged.coverage >= config.least_coverage;
        if self.open.is_some() {
            self.worst_since = Some(self.worst_since.map_or(judged, |worst| worse(worst, judged)));
            if !is_clear {
                self.go_on();
                return;
            }
            let (since, count) = self.clear.map_or((at, 1), |(since, count)| (since, count + 1));
            self.clear = Some((since, count));
            if count >= config.clear_panes {
                let ended = self.open.take().map(|episode| Episode { end_at: Some(since), ..episode });
                *self = State { closed: ended, ..State::default() };
            }
            return;
        }
        if judged.share <= config.open_share {
            self.over.clear();
            return;
        }
        self.over.push(judged);
        if self.over.len() >= config.open_panes as usize {
            let run = std::mem::take(&mut self.over);
            if let (Some(first), Some(worst)) = (run.first(), run.iter().copied().reduce(worse)) {
                self.open = Some(Episode { onset_at: first.at, end_at: None, worst });
            }
        }
    }

    /// What looked like the end was none.
    fn go_on(&mut self) {
        self.clear = None;
        if let (Some(episode), Some(worst)) = (&mut self.open, self.worst_since.take()) {
            episode.worst = worse(episode.worst, worst);
        }
    }
}

impl FeedOverRating {
    pub fn new(config: &FeedOverRatingConfig) -> FeedOverRating {
        FeedOverRating { config: config.clone(), known: Known::default() }
    }

    /// One host's part in a pane, from the record at `offset`; a later one replaces it.
    pub fn partial(&mut self, partial: &Partial, offset: i64) {
        let read: Vec<i64> = partial.milliwatts.iter().flatten().copied().collect();
        let Some(sum) = read.iter().copied().reduce(i64::saturating_add) else { return };
        if self.known.floor.is_some_and(|floor| partial.pane_at.saturating_add(self.config.pane) <= floor) {
            self.known.too_late += 1;
            return;
        }
        let mean = sum.div_euclid(i64::try_from(read.len()).unwrap_or(1));
        let feed = self.known.feeds.entry(partial.key.clone()).or_default();
        let pane = feed.panes.entry(partial.pane_at).or_default();
        pane.hosts.insert(partial.host.clone(), mean);
        pane.offsets.include(offset);
    }

    pub fn too_late(&self) -> u64 {
        self.known.too_late
    }

    /// Time has come to `now`, and what lies at or before `floor` is final.
    pub fn advance(
        &mut self,
        now: i64,
        floor: i64,
        groups: &BTreeMap<(String, String), Group>,
        findings: &mut Vec<Finding>,
    ) {
        self.known.floor = Some(floor);
        for (key, feed) in &mut self.known.feeds {
            let group = groups.get(&(GroupKind::PowerDomain.as_str().to_owned(), key.clone()));
            let Some(first) = feed.settled_to.or_else(|| feed.panes.keys().next().copied()) else { continue };
            let pane = self.config.pane;
            let judge = |feed: &Feed, at: i64| feed.panes.get(&at).and_then(|pane| judged(at, pane, group));
            let mut at = first;
            while at + pane <= floor {
                let judged = judge(feed, at);
                feed.settled.pane(at, judged, &self.config);
                feed.panes.remove(&at);
                at += pane;
            }
            if at > first {
                feed.settled_to = Some(at);
            }
            let mut present = feed.settled.clone();
            while at + pane <= now {
                present.pane(at, judge(feed, at), &self.config);
                at += pane;
            }
            for episode in present.closed.iter().chain(&present.open) {
                findings.push(finding(key, episode, &self.config));
            }
        }
    }

    pub fn save(&self) -> Section {
        Section::of("feed_over_rating", 1, &self.known)
    }

    pub fn load(&mut self, section: &Section) -> Result<(), StateError> {
        self.known = section.read(1)?;
        Ok(())
    }
}

/// The pane against the group's rating; none without one.
fn judged(at: i64, pane: &Pane, group: Option<&Group>) -> Option<Judged> {
    let group = group?;
    let rating_watts = group.rating_watts.filter(|rating| *rating > 0)?;
    let milliwatts = pane.hosts.values().copied().fold(0, i64::saturating_add);
    let expected = group.hosts.len().max(1);
    let heard = group.hosts.iter().filter(|host| pane.hosts.contains_key(*host)).count();
    Some(Judged {
        at,
        milliwatts,
        rating_watts,
        share: milliwatts as f64 / (rating_watts as f64 * 1000.0),
        coverage: heard as f64 / expected as f64,
        offsets: pane.offsets,
    })
}

fn finding(key: &str, episode: &Episode, config: &FeedOverRatingConfig) -> Finding {
    let worst = episode.worst;
    let severity = if worst.share >= config.critical_share { Severity::Critical } else { Severity::Warning };
    let entity = Entity { feed: Some(key.to_owned()), ..Entity::default() };
    let evidence =
        |name: &str, value: i64| Evidence { at: worst.at, name: name.to_owned(), value, before: None, reset: false };
    Finding {
        kind: "feed_over_rating",
        cause: None,
        subject: key.to_owned(),
        facet: String::new(),
        severity,
        onset_at: episode.onset_at,
        end_at: episode.end_at,
        late: false,
        code: None,
        statistic: "GPU power of the feed's hosts as a share of its rating",
        value: worst.share,
        threshold: if severity == Severity::Critical { config.critical_share } else { config.open_share },
        count: 1,
        summary: format!(
            "{} draws {} W of {} W, {:.0} %, over {} s, with {:.0} % of its hosts heard",
            entity.text(),
            worst.milliwatts / 1000,
            worst.rating_watts,
            worst.share * 100.0,
            config.pane / SECOND,
            worst.coverage * 100.0
        ),
        actions: vec![
            "lower the power limit of the feed's GPUs, or drain some".to_owned(),
            "check whether the other feed has failed over to this one".to_owned(),
        ],
        evidence: vec![evidence("milliwatts", worst.milliwatts), evidence("rating_watts", worst.rating_watts)],
        coverage: Some(worst.coverage),
        raw: None,
        offsets: worst.offsets,
        entity,
    }
}
