//! `ecc_uncorrectable`: an error counter shows more than its last reading, or a remapping fails.
//!
//! The first look at a counter is its baseline; one that went down was zeroed, and what it shows came since. An episode
//! ends with the newest reset once a reading after it shows no remapping that is pending or failed; a reading that does
//! not tell counts as none, as the detector has it.

use gpufleet_schemas::metric::{Metric, Tier};
use gpufleet_schemas::record::Severity;

use super::{Entity, Episode, Log, Who};

struct Reading {
    at: i64,
    volatile: Option<i64>,
    aggregate: Option<i64>,
    remap_pending: Option<i64>,
    remap_failed: Option<i64>,
}

pub(super) fn entities(log: &Log<'_>) -> Vec<Entity> {
    log.gpus()
        .into_iter()
        .map(|(host, uuid)| {
            let (host, subject, gpu) = (host.to_owned(), uuid.to_owned(), uuid.to_owned());
            let episodes = episodes(&readings(log, &host, uuid), &log.resets(&host));
            Entity { who: Who { kind: "ecc_uncorrectable", host, subject, gpu, memory: true }, episodes }
        })
        .collect()
}

fn readings(log: &Log<'_>, host: &str, uuid: &str) -> Vec<Reading> {
    let mut readings = Vec::new();
    for (batch, block) in log.blocks(host, uuid) {
        for (i, tick) in block.ticks(Tier::Health).iter().enumerate() {
            let value = |metric: Metric| block.series(metric).get(i);
            readings.push(Reading {
                at: batch.tick_at(usize::try_from(*tick).unwrap_or(0)),
                volatile: value(Metric::EccDbeVolatile),
                aggregate: value(Metric::EccDbeAggregate),
                remap_pending: value(Metric::RowRemapPending),
                remap_failed: value(Metric::RowRemapFailed),
            });
        }
    }
    readings.retain(|reading| reading.at <= log.until);
    readings.sort_by_key(|reading| reading.at);
    readings
}

fn episodes(readings: &[Reading], resets: &[i64]) -> Vec<Episode> {
    let mut episodes = Vec::new();
    let mut from = 0;
    while let Some(first) = (from..readings.len()).find(|i| wrong(&readings[..*i], &readings[*i])) {
        let onset_at = readings[first].at;
        // The reading that shows the GPU healed, and the reset that healed it.
        let healed = (first..readings.len()).find_map(|i| {
            let reset = resets.iter().copied().filter(|reset| *reset <= readings[i].at).max()?;
            (reset > onset_at && sound(&readings[i])).then_some((i, reset))
        });
        episodes.push(Episode {
            onset_at,
            end_at: healed.map(|(_, reset)| reset),
            resolved_at: healed.map(|(i, _)| readings[i].at),
            severity: Severity::Critical,
            code: None,
        });
        from = healed.map_or(readings.len(), |(i, _)| i + 1);
    }
    episodes
}

/// A reading that shows an error which none before it has shown.
fn wrong(before: &[Reading], now: &Reading) -> bool {
    let failed = last(before, |reading| reading.remap_failed) == Some(0) && now.remap_failed == Some(1);
    failed || grew(before, now, |reading| reading.volatile) || grew(before, now, |reading| reading.aggregate)
}

fn grew(before: &[Reading], now: &Reading, counter: fn(&Reading) -> Option<i64>) -> bool {
    match (last(before, counter), counter(now)) {
        (Some(was), Some(is)) => is > was || (is < was && is > 0),
        _ => false,
    }
}

/// The newest value that was read.
fn last(readings: &[Reading], value: fn(&Reading) -> Option<i64>) -> Option<i64> {
    readings.iter().rev().find_map(value)
}

fn sound(reading: &Reading) -> bool {
    reading.remap_pending != Some(1) && reading.remap_failed != Some(1)
}
