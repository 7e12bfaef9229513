//! `ecc_uncorrectable`: memory returned wrong data that ECC could not correct, or a row could not be remapped.
//!
//! One error is enough (`docs/reference/detectors.md`). Counters are compared with reset logic: a counter that went
//! down was zeroed, and what it shows now came since. A first look at a GPU is the baseline, whatever it shows. Resolves
//! only when a reset has left no remapping pending and none failed; errors do not un-happen by themselves.

use std::collections::{BTreeMap, BTreeSet};

use gpufleet_schemas::metric::Metric;
use gpufleet_schemas::record::{Evidence, GpuBatch, GpuBlock, Severity};
use serde::{Deserialize, Serialize};

use super::{Detector, Source, precedence};
use crate::engine::finding::Offsets;
use crate::engine::{Entities, Finding, Fold, GpuId, Reorder, Section, StateError};

/// The counters of one GPU at one tick.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Reading {
    volatile: Option<i64>,
    aggregate: Option<i64>,
    remap_pending: Option<i64>,
    remap_failed: Option<i64>,
    offset: i64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
enum Fact {
    Reading(Reading),
    Reset { number: u32 },
}

/// What a counter shows more than before.
#[derive(Clone, Copy)]
struct Growth {
    metric: Metric,
    errors: i64,
    before: i64,
    now: i64,
    reset: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Episode {
    onset_at: i64,
    end_at: Option<i64>,
    errors: i64,
    remap_failed: bool,
    late: bool,
    evidence: Evidence,
    offsets: Offsets,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct State {
    newest: Option<(i64, Reading)>,
    /// When the host's counters were zeroed last.
    reset_at: Option<i64>,
    reset: Option<u32>,
    open: Option<Episode>,
    closed: Option<Episode>,
}

impl State {
    /// Errors that `now` shows more than `before`. A counter that went down was zeroed in between; one that shows the
    /// same after a reset cannot tell, and the lifetime counter speaks for it.
    fn growth(before: &Reading, now: &Reading) -> Option<Growth> {
        let counter = |metric, before: Option<i64>, now: Option<i64>| {
            let (before, now) = (before?, now?);
            let reset = now < before;
            let errors = if reset { now } else { now - before };
            (errors > 0).then_some(Growth { metric, errors, before, now, reset })
        };
        counter(Metric::EccDbeVolatile, before.volatile, now.volatile)
            .or_else(|| counter(Metric::EccDbeAggregate, before.aggregate, now.aggregate))
    }

    fn change(&mut self, at: i64, before: &Reading, now: &Reading, late: bool) {
        let failed = now.remap_failed == Some(1) && before.remap_failed == Some(0);
        let growth = Self::growth(before, now);
        if growth.is_none() && !failed {
            return;
        }
        let Growth { metric, errors, before: was, now: is, reset } =
            growth.unwrap_or(Growth { metric: Metric::RowRemapFailed, errors: 0, before: 0, now: 1, reset: false });
        let episode = self.open.get_or_insert_with(|| Episode {
            onset_at: at,
            end_at: None,
            errors: 0,
            remap_failed: false,
            late,
            evidence: Evidence { at, name: metric.name().to_owned(), value: is, before: Some(was), reset },
            offsets: Offsets::default(),
        });
        episode.errors += errors;
        episode.remap_failed |= failed;
        episode.offsets.include(now.offset);
    }
}

impl Fold<Fact> for State {
    type Rule = ();

    fn step(&mut self, at: i64, fact: &Fact, (): &()) {
        match fact {
            Fact::Reading(now) => self.read(at, now),
            Fact::Reset { number } if self.reset >= Some(*number) => {}
            Fact::Reset { number } => {
                self.reset = Some(*number);
                self.reset_at = self.reset_at.max(Some(at));
            }
        }
    }
}

impl State {
    fn read(&mut self, at: i64, now: &Reading) {
        let Some((before_at, before)) = self.newest.clone() else {
            self.newest = Some((at, now.clone()));
            return;
        };
        let late = at < before_at;
        if late {
            // Older than what has settled: it can only add an error, never take one away.
            if Self::growth(&before, now).is_some_and(|growth| !growth.reset) {
                self.change(at, &before, now, true);
                self.newest = Some((before_at, now.clone()));
            }
            return;
        }
        self.change(at, &before, now, false);
        let healed = now.remap_pending != Some(1) && now.remap_failed != Some(1);
        let reset_at = self.reset_at.filter(|_| healed);
        if let Some(mut episode) = self.open.take_if(|open| reset_at.is_some_and(|reset| reset > open.onset_at)) {
            episode.end_at = reset_at;
            self.closed = Some(episode);
        }
        let keep = |new: Option<i64>, old: Option<i64>| new.or(old);
        self.newest = Some((
            at,
            Reading {
                volatile: keep(now.volatile, before.volatile),
                aggregate: keep(now.aggregate, before.aggregate),
                remap_pending: keep(now.remap_pending, before.remap_pending),
                remap_failed: keep(now.remap_failed, before.remap_failed),
                ..now.clone()
            },
        ));
    }
}

/// The detector.
#[derive(Default, Serialize, Deserialize)]
pub struct EccUncorrectable {
    gpus: BTreeMap<GpuId, Reorder<Fact, State>>,
    by_host: BTreeMap<String, BTreeSet<GpuId>>,
    /// GPUs with a fact that waits for its time, and those whose incident may still change.
    due: BTreeSet<(i64, GpuId)>,
    active: BTreeSet<GpuId>,
    floor: Option<i64>,
}

impl Detector for EccUncorrectable {
    fn kind(&self) -> &'static str {
        "ecc_uncorrectable"
    }

    fn block(&mut self, gpu: GpuId, batch: &GpuBatch, block: &GpuBlock, source: Source) {
        let health = block.ticks(Metric::EccDbeVolatile.tier());
        for (i, tick) in health.iter().enumerate() {
            let at = batch.tick_at(usize::try_from(*tick).unwrap_or(0));
            let value = |metric: Metric| block.series(metric).get(i);
            let reading = Reading {
                volatile: value(Metric::EccDbeVolatile),
                aggregate: value(Metric::EccDbeAggregate),
                remap_pending: value(Metric::RowRemapPending),
                remap_failed: value(Metric::RowRemapFailed),
                offset: source.offset,
            };
            let fold = self.gpus.entry(gpu).or_insert_with(|| {
                self.by_host.entry(batch.origin.host.clone()).or_default().insert(gpu);
                Reorder::default()
            });
            let reading = Fact::Reading(reading);
            if self.floor.is_some_and(|floor| at <= floor) {
                fold.insert_late(at, &reading, &());
                self.active.insert(gpu);
            } else {
                fold.insert(at, source.seq, u32::try_from(i + 1).unwrap_or(u32::MAX), reading);
                self.due.insert((at, gpu));
            }
        }
    }

    fn reset(&mut self, host: &str, at: i64, number: u32, source: Source) {
        for gpu in self.by_host.get(host).into_iter().flatten() {
            if let Some(fold) = self.gpus.get_mut(gpu) {
                fold.insert(at, source.seq, 0, Fact::Reset { number });
            }
        }
    }

    fn advance(&mut self, now: i64, floor: i64, entities: &Entities, findings: &mut Vec<Finding>) -> bool {
        self.floor = Some(floor);
        while self.due.first().is_some_and(|(at, _)| *at <= now) {
            if let Some((_, gpu)) = self.due.pop_first() {
                self.active.insert(gpu);
            }
        }
        let gpus = &mut self.gpus;
        self.active.retain(|gpu| {
            let Some(fold) = gpus.get_mut(gpu) else { return false };
            fold.settle(floor, &());
            let present = fold.present(now, &());
            findings.extend(present.closed.iter().chain(&present.open).map(|episode| finding(episode, entities, *gpu)));
            present.open.is_some() || (present.closed.is_some() && fold.waits())
        });
        true
    }

    fn save(&self) -> Section {
        Section::of(self.kind(), 1, self)
    }

    fn load(&mut self, section: &Section) -> Result<(), StateError> {
        *self = section.read(1)?;
        Ok(())
    }
}

fn finding(episode: &Episode, entities: &Entities, gpu: GpuId) -> Finding {
    let entity = entities.get(gpu).clone();
    let what = if episode.remap_failed {
        "could not remap a broken memory row".to_owned()
    } else {
        format!("has {} uncorrectable memory error{}", episode.errors, if episode.errors == 1 { "" } else { "s" })
    };
    Finding {
        kind: "ecc_uncorrectable",
        cause: precedence::cause("ecc_uncorrectable", None),
        subject: entity.gpu_uuid.clone().unwrap_or_default(),
        facet: String::new(),
        severity: Severity::Critical,
        onset_at: episode.onset_at,
        end_at: episode.end_at,
        late: episode.late,
        code: None,
        statistic: "uncorrected ECC errors since the onset",
        value: episode.errors as f64,
        threshold: 0.0,
        count: episode.errors.max(1),
        summary: format!("{} {what}", entity.text()),
        actions: vec![
            "drain the GPU".to_owned(),
            "reset it, so that the row is remapped".to_owned(),
            "replace it if the remapping fails or errors come back within 30 days".to_owned(),
        ],
        evidence: vec![episode.evidence.clone()],
        coverage: None,
        raw: None,
        offsets: episode.offsets,
        entity,
    }
}
