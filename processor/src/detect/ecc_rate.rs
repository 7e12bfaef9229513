//! `ecc_rate`: a GPU's corrected memory errors come much faster than they used to.
//!
//! Poisson CUSUM on the GPU's own counter (`docs/reference/detectors.md`): S = max(0, S + x ln(L1/L0) - (L1 - L0) t),
//! alarm above h, where L0 is the GPU's learned rate and L1 the rate looked for. Counters are compared with reset
//! logic, so a driver reload that zeroes them is no error. Corrected errors hardly predict uncorrected ones: this is a
//! warning, never a reason to pull a GPU at once.

use std::collections::{BTreeMap, BTreeSet};

use gpufleet_schemas::instant::SECOND;
use gpufleet_schemas::metric::Metric;
use gpufleet_schemas::record::{Evidence, GpuBatch, GpuBlock, Severity};
use serde::{Deserialize, Serialize};

use super::config::EccRateConfig;
use super::{Detector, Source};
use crate::engine::finding::Offsets;
use crate::engine::{Entities, Finding, Fold, GpuId, Reorder, Section, StateError};

const HOUR: f64 = 3600.0 * SECOND as f64;

/// The counter of one GPU at one tick.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Reading {
    corrected: i64,
    offset: i64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Episode {
    onset_at: i64,
    last_error_at: i64,
    end_at: Option<i64>,
    errors: i64,
    statistic: f64,
    evidence: Evidence,
    offsets: Offsets,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct State {
    newest: Option<(i64, i64)>,
    /// Errors and microseconds that the learned rate rests on.
    errors: i64,
    span: i64,
    cusum: f64,
    /// First error, errors and first reading since the test left zero.
    excursion: Option<Episode>,
    open: Option<Episode>,
    closed: Option<Episode>,
}

impl Fold<Reading> for State {
    type Rule = EccRateConfig;

    fn step(&mut self, at: i64, now: &Reading, rule: &EccRateConfig) {
        let Some((before_at, before)) = self.newest else {
            self.newest = Some((at, now.corrected));
            return;
        };
        if at < before_at {
            return;
        }
        self.newest = Some((at, now.corrected));
        let reset = now.corrected < before;
        let errors = if reset { now.corrected } else { now.corrected - before };
        let evidence = Evidence {
            at,
            name: Metric::EccSbeVolatile.name().to_owned(),
            value: now.corrected,
            before: Some(before),
            reset,
        };
        if self.open.is_some() {
            self.go_on(at, errors, now, rule);
        } else {
            self.test(at, before_at, errors, evidence, now, rule);
        }
    }
}

impl State {
    /// One step of the test while nothing is open.
    fn test(&mut self, at: i64, before_at: i64, errors: i64, evidence: Evidence, now: &Reading, rule: &EccRateConfig) {
        let hours = (at - before_at) as f64 / HOUR;
        let learned = (rule.prior_errors + self.errors as f64) / (rule.prior_hours + self.span as f64 / HOUR);
        let usual = learned.clamp(rule.lowest_rate_per_hour, rule.highest_rate_per_hour);
        let sought = (rule.rate_ratio * usual).max(rule.least_rate_per_hour);
        self.cusum = (self.cusum + errors as f64 * (sought / usual).ln() - (sought - usual) * hours).max(0.0);
        self.errors += errors;
        self.span += at - before_at;
        if self.cusum <= 0.0 {
            self.excursion = None;
        } else if errors > 0 {
            let excursion = self.excursion.get_or_insert(Episode {
                onset_at: at,
                last_error_at: at,
                end_at: None,
                errors: 0,
                statistic: 0.0,
                evidence,
                offsets: Offsets::default(),
            });
            excursion.add(at, errors, now.offset);
            excursion.statistic = self.cusum;
        }
        if self.cusum > rule.cusum_threshold {
            self.open = self.excursion.take();
        }
    }

    fn go_on(&mut self, at: i64, errors: i64, now: &Reading, rule: &EccRateConfig) {
        let Some(open) = &mut self.open else { return };
        if errors > 0 {
            open.add(at, errors, now.offset);
        } else if at - open.last_error_at >= rule.quiet {
            open.end_at = Some(open.last_error_at);
            self.closed = self.open.take();
            self.cusum = 0.0;
        }
    }
}

impl Episode {
    fn add(&mut self, at: i64, errors: i64, offset: i64) {
        self.last_error_at = at;
        self.errors += errors;
        self.offsets.include(offset);
    }
}

/// The detector.
pub struct EccRate {
    config: EccRateConfig,
    known: Known,
}

/// Its state, with the learned rate of every GPU.
#[derive(Default, Serialize, Deserialize)]
struct Known {
    gpus: BTreeMap<GpuId, Reorder<Reading, State>>,
    due: BTreeSet<(i64, GpuId)>,
    active: BTreeSet<GpuId>,
    floor: Option<i64>,
    too_late: u64,
}

impl EccRate {
    pub fn new(config: &EccRateConfig) -> EccRate {
        EccRate { config: config.clone(), known: Known::default() }
    }
}

impl Detector for EccRate {
    fn kind(&self) -> &'static str {
        "ecc_rate"
    }

    fn block(&mut self, gpu: GpuId, batch: &GpuBatch, block: &GpuBlock, source: Source) {
        for (i, (tick, corrected)) in block.readings(Metric::EccSbeVolatile).enumerate() {
            let at = batch.tick_at(tick);
            if self.known.floor.is_some_and(|floor| at <= floor) {
                self.known.too_late += 1;
                continue;
            }
            let reading = Reading { corrected, offset: source.offset };
            let place = u32::try_from(i).unwrap_or(u32::MAX);
            self.known.gpus.entry(gpu).or_default().insert(at, source.seq, place, reading);
            self.known.due.insert((at, gpu));
        }
    }

    fn advance(&mut self, now: i64, floor: i64, entities: &Entities, findings: &mut Vec<Finding>) -> bool {
        let (known, config) = (&mut self.known, &self.config);
        known.floor = Some(floor);
        while known.due.first().is_some_and(|(at, _)| *at <= now) {
            if let Some((_, gpu)) = known.due.pop_first() {
                known.active.insert(gpu);
            }
        }
        let gpus = &mut known.gpus;
        known.active.retain(|gpu| {
            let Some(fold) = gpus.get_mut(gpu) else { return false };
            fold.settle(floor, config);
            let present = fold.present(now, config);
            let episodes = present.closed.iter().chain(&present.open);
            findings.extend(episodes.map(|episode| finding(episode, entities, *gpu, config.cusum_threshold)));
            present.open.is_some() || (present.closed.is_some() && fold.waits())
        });
        true
    }

    fn too_late(&self) -> u64 {
        self.known.too_late
    }

    fn save(&self) -> Section {
        Section::of(self.kind(), 1, &self.known)
    }

    fn load(&mut self, section: &Section) -> Result<(), StateError> {
        self.known = section.read(1)?;
        Ok(())
    }
}

fn finding(episode: &Episode, entities: &Entities, gpu: GpuId, threshold: f64) -> Finding {
    let entity = entities.get(gpu).clone();
    let minutes = (episode.last_error_at - episode.onset_at) / (60 * SECOND);
    Finding {
        kind: "ecc_rate",
        cause: None,
        subject: entity.gpu_uuid.clone().unwrap_or_default(),
        facet: String::new(),
        severity: Severity::Warning,
        onset_at: episode.onset_at,
        end_at: episode.end_at,
        late: false,
        code: None,
        statistic: "Poisson CUSUM of corrected ECC errors",
        value: episode.statistic,
        threshold,
        count: episode.errors,
        summary: format!(
            "{} corrects memory errors much faster than usual: {} in {} min",
            entity.text(),
            episode.errors,
            minutes.max(1)
        ),
        actions: vec![
            "watch: corrected errors alone are no reason to pull the GPU".to_owned(),
            "run the field diagnostic at the next maintenance".to_owned(),
        ],
        evidence: vec![episode.evidence.clone()],
        coverage: None,
        raw: None,
        offsets: episode.offsets,
        entity,
    }
}
