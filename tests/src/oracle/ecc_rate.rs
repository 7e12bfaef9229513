//! `ecc_rate`: corrected errors come much faster than the GPU's own history has them.
//!
//! The Poisson CUSUM without its recursion: after the n-th step the statistic is the greatest sum of weights over any
//! run of steps that ends there, and zero where all those sums are negative. A step is what lies between two readings.

use gpufleet_processor::detect::DetectorsConfig;
use gpufleet_schemas::instant::SECOND;
use gpufleet_schemas::metric::Metric;
use gpufleet_schemas::record::Severity;

use super::{Entity, Episode, Log, Who};

const HOUR: f64 = 3600.0 * SECOND as f64;

#[derive(Clone, Copy)]
struct Step {
    at: i64,
    span: i64,
    errors: i64,
}

pub(super) fn entities(log: &Log<'_>, config: &DetectorsConfig) -> Vec<Entity> {
    log.gpus()
        .into_iter()
        .map(|(host, uuid)| {
            let readings = log.readings(host, uuid, Metric::EccSbeVolatile);
            let steps: Vec<Step> = readings.windows(2).map(|pair| step(pair[0], pair[1])).collect();
            let (host, subject, gpu) = (host.to_owned(), uuid.to_owned(), uuid.to_owned());
            let who = Who { kind: "ecc_rate", host, subject, gpu, memory: false };
            Entity { who, episodes: episodes(&steps, config) }
        })
        .collect()
}

/// A counter that went down was zeroed: what it shows came since.
fn step((before_at, before): (i64, i64), (at, now): (i64, i64)) -> Step {
    Step { at, span: at - before_at, errors: if now < before { now } else { now - before } }
}

fn episodes(steps: &[Step], config: &DetectorsConfig) -> Vec<Episode> {
    let mut episodes = Vec::new();
    // Steps that were tested before: the history that the usual rate is learned from.
    let mut history: Vec<Step> = Vec::new();
    let mut from = 0;
    while from < steps.len() {
        let rest = &steps[from..];
        let weights: Vec<f64> = (0..rest.len())
            .map(|i| {
                let known: Vec<Step> = history.iter().chain(&rest[..i]).copied().collect();
                weight(&rest[i], &known, config)
            })
            .collect();
        let statistics: Vec<f64> = (0..rest.len()).map(|i| statistic(&weights[..=i])).collect();
        let Some(alarm) = statistics.iter().position(|statistic| *statistic > config.ecc_rate.cusum_threshold) else {
            break;
        };
        // The first error since the statistic left zero.
        let left_zero = (0..alarm).rev().find(|i| statistics[*i] <= 0.0).map_or(0, |zero| zero + 1);
        let first = (left_zero..=alarm).find(|i| rest[*i].errors > 0).unwrap_or(alarm);
        let quiet = (alarm + 1..rest.len())
            .find(|i| rest[*i].errors == 0 && rest[*i].at - last_error(&rest[..*i]) >= config.ecc_rate.quiet);
        episodes.push(Episode {
            onset_at: rest[first].at,
            end_at: quiet.map(|i| last_error(&rest[..i])),
            resolved_at: quiet.map(|i| rest[i].at),
            severity: Severity::Warning,
            code: None,
        });
        history.extend(&rest[..=alarm]);
        from = quiet.map_or(steps.len(), |i| from + i + 1);
    }
    episodes
}

/// Log-likelihood ratio of the step: for the rate looked for, against the usual one.
fn weight(step: &Step, known: &[Step], config: &DetectorsConfig) -> f64 {
    let rule = &config.ecc_rate;
    let errors: i64 = known.iter().map(|step| step.errors).sum();
    let span: i64 = known.iter().map(|step| step.span).sum();
    let learned = (rule.prior_errors + errors as f64) / (rule.prior_hours + span as f64 / HOUR);
    let usual = learned.clamp(rule.lowest_rate_per_hour, rule.highest_rate_per_hour);
    let sought = (rule.rate_ratio * usual).max(rule.least_rate_per_hour);
    step.errors as f64 * (sought / usual).ln() - (sought - usual) * step.span as f64 / HOUR
}

/// The greatest sum of the last weights, at least zero.
fn statistic(weights: &[f64]) -> f64 {
    let (mut greatest, mut sum) = (0.0_f64, 0.0);
    for weight in weights.iter().rev() {
        sum += weight;
        greatest = greatest.max(sum);
    }
    greatest
}

fn last_error(steps: &[Step]) -> i64 {
    steps.iter().rev().find(|step| step.errors > 0).map_or(i64::MIN / 2, |step| step.at)
}
