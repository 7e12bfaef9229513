//! `ecc_uncorrectable`: memory returned wrong data that ECC could not correct, or a row could not be remapped.
//!
//! One error is enough (`docs/reference/detectors.md`). Counters are compared with reset logic: a counter that went
//! down was zeroed, and what it shows now came since. A first look at a GPU is the baseline, whatever it shows. Resolves
//! only when a reset has left no remapping pending and none failed; errors do not un-happen by themselves.

use std::collections::{BTreeMap, BTreeSet};

use gpufleet_schemas::metric::Metric;
use gpufleet_schemas::record::{Evidence, GpuBatch, GpuBlock, Severity};

use super::{Detector, Source};
use crate::engine::finding::Offsets;
use crate::engine::{Entities, Finding, Fold, GpuId, Reorder};

/// The counters of one GPU at one tick.
#[derive(Clone, Debug)]
struct Reading {
    epoch: i32,
    volatile: Option<i64>,
    aggregate: Option<i64>,
    remap_pending: Option<i64>,
    remap_failed: Option<i64>,
    offset: i64,
}

#[derive(Clone, Debug)]
struct Episode {
    onset_at: i64,
    end_at: Option<i64>,
    errors: i64,
    remap_failed: bool,
    late: bool,
    evidence: Evidence,
    offsets: Offsets,
}

#[derive(Clone, Debug, Default)]
struct State {
    newest: Option<(i64, Reading)>,
    open: Option<Episode>,
    closed: Option<Episode>,
}

impl State {
    /// Errors that `now` shows more than `before`; a counter that went down was zeroed in between.
    fn growth(before: &Reading, now: &Reading) -> Option<(i64, i64, i64, bool)> {
        let counter = |before: Option<i64>, now: Option<i64>, zeroed: bool| {
            let (before, now) = (before?, now?);
            let reset = zeroed || now < before;
            Some((if reset { now } else { now - before }, before, now, reset))
        };
        counter(before.volatile, now.volatile, before.epoch != now.epoch)
            .or_else(|| counter(before.aggregate, now.aggregate, false))
            .filter(|(growth, ..)| *growth > 0)
    }

    fn change(&mut self, at: i64, before: &Reading, now: &Reading, late: bool) {
        let failed = now.remap_failed == Some(1) && before.remap_failed == Some(0);
        let growth = Self::growth(before, now);
        if growth.is_none() && !failed {
            return;
        }
        let (errors, was, is, reset) = growth.unwrap_or((0, 0, 1, false));
        let name = if growth.is_some() { Metric::EccDbeVolatile } else { Metric::RowRemapFailed };
        let episode = self.open.get_or_insert_with(|| Episode {
            onset_at: at,
            end_at: None,
            errors: 0,
            remap_failed: false,
            late,
            evidence: Evidence { at, name: name.name().to_owned(), value: is, before: Some(was), reset },
            offsets: Offsets::default(),
        });
        episode.errors += errors;
        episode.remap_failed |= failed;
        episode.offsets.include(now.offset);
    }
}

impl Fold<Reading> for State {
    fn step(&mut self, at: i64, now: &Reading) {
        let Some((before_at, before)) = self.newest.clone() else {
            self.newest = Some((at, now.clone()));
            return;
        };
        let late = at < before_at;
        if late {
            // Older than what has settled: it can only add an error, never take one away.
            if Self::growth(&before, now).is_some_and(|(.., reset)| !reset) {
                self.change(at, &before, now, true);
                self.newest = Some((before_at, now.clone()));
            }
            return;
        }
        self.change(at, &before, now, false);
        let healed = now.remap_pending != Some(1) && now.remap_failed != Some(1);
        if before.epoch != now.epoch && healed && self.open.as_ref().is_some_and(|open| open.onset_at < at) {
            if let Some(mut episode) = self.open.take() {
                episode.end_at = Some(at);
                self.closed = Some(episode);
            }
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
#[derive(Default)]
pub struct EccUncorrectable {
    gpus: BTreeMap<GpuId, Reorder<Reading, State>>,
    /// GPUs with a fact that waits for its time, and those whose incident may still change.
    due: BTreeSet<(i64, GpuId)>,
    active: BTreeSet<GpuId>,
    floor: Option<i64>,
}

impl Detector for EccUncorrectable {
    fn block(&mut self, gpu: GpuId, batch: &GpuBatch, block: &GpuBlock, source: Source) {
        let health = block.ticks(Metric::EccDbeVolatile.tier());
        for (i, tick) in health.iter().enumerate() {
            let at = batch.tick_at(usize::try_from(*tick).unwrap_or(0));
            let value = |metric: Metric| block.series(metric).get(i);
            let reading = Reading {
                epoch: batch.origin.reset_epoch,
                volatile: value(Metric::EccDbeVolatile),
                aggregate: value(Metric::EccDbeAggregate),
                remap_pending: value(Metric::RowRemapPending),
                remap_failed: value(Metric::RowRemapFailed),
                offset: source.offset,
            };
            let fold = self.gpus.entry(gpu).or_default();
            if self.floor.is_some_and(|floor| at <= floor) {
                fold.insert_late(at, &reading);
                self.active.insert(gpu);
            } else {
                fold.insert(at, source.seq, u32::try_from(i).unwrap_or(u32::MAX), reading);
                self.due.insert((at, gpu));
            }
        }
    }

    fn advance(&mut self, now: i64, floor: i64, entities: &Entities, findings: &mut Vec<Finding>) {
        self.floor = Some(floor);
        while self.due.first().is_some_and(|(at, _)| *at <= now) {
            if let Some((_, gpu)) = self.due.pop_first() {
                self.active.insert(gpu);
            }
        }
        let gpus = &mut self.gpus;
        self.active.retain(|gpu| {
            let Some(fold) = gpus.get_mut(gpu) else { return false };
            fold.settle(floor);
            let present = fold.present(now);
            findings.extend(present.closed.iter().chain(&present.open).map(|episode| finding(episode, entities, *gpu)));
            present.open.is_some() || (present.closed.is_some() && fold.waits())
        });
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
        raw: None,
        offsets: episode.offsets,
        entity,
    }
}
