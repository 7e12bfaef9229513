//! `feed_over_rating`: the GPUs on a power feed draw more than the feed may carry, for several panes in a row.
//!
//! Every pane of the log is computed from its samples alone. A host on several feeds loads each with an equal part.
//! Assumed: a host's feeds do not change, and the hosts that draw from a feed are those of its group in the topology.

use std::collections::BTreeMap;

use gpufleet_processor::detect::DetectorsConfig;
use gpufleet_schemas::instant::SECOND;
use gpufleet_schemas::metric::Metric;
use gpufleet_schemas::record::{Group, GroupKind, Labels, Severity};

use super::{Entity, Episode, Log, Who};

struct Pane {
    start: i64,
    /// Load over rating; none in a pane without any data.
    share: Option<f64>,
    coverage: f64,
}

pub(super) fn entities(log: &Log<'_>, config: &DetectorsConfig) -> Vec<Entity> {
    // By key; a later topology's group replaces an earlier one's.
    let mut groups: BTreeMap<&str, &Group> = BTreeMap::new();
    for topology in log.topologies.iter().copied() {
        let domains = topology.groups.iter().filter(|group| group.kind == GroupKind::PowerDomain);
        groups.extend(domains.map(|group| (group.key.as_str(), group)));
    }
    groups
        .into_values()
        .map(|group| {
            let (host, subject, gpu) = (String::new(), group.key.clone(), String::new());
            let who = Who { kind: "feed_over_rating", host, subject, gpu, memory: false };
            Entity { who, episodes: episodes(&panes(log, group, config), config) }
        })
        .collect()
}

/// `site/feed`, or `feed` where there is no site.
fn keys(labels: &Labels) -> Vec<String> {
    let key = |feed: &String| match &labels.site {
        Some(site) => format!("{site}/{feed}"),
        None => feed.clone(),
    };
    labels.feeds.iter().map(key).collect()
}

/// Every pane of the feed from its first sample on that ended by the end of the log, those without data too.
fn panes(log: &Log<'_>, group: &Group, config: &DetectorsConfig) -> Vec<Pane> {
    let Some(rating) = group.rating_watts.filter(|rating| *rating > 0) else { return Vec::new() };
    let length = config.feed_over_rating.pane;
    let hosts: Vec<BTreeMap<i64, i64>> =
        log.hosts().into_iter().map(|host| milliwatts(log, host, &group.key)).collect();
    let Some(first_at) = hosts.iter().flat_map(BTreeMap::keys).min() else { return Vec::new() };
    let mut panes = Vec::new();
    let mut start = first_at.div_euclid(length) * length;
    while start + length <= log.until {
        // Each heard host's mean over the seconds in which it was read.
        let loads: Vec<i64> = hosts
            .iter()
            .filter_map(|host| {
                let seconds: Vec<i64> = host.range(start..start + length).map(|(_, milliwatts)| *milliwatts).collect();
                (!seconds.is_empty()).then(|| floor_mean(&seconds))
            })
            .collect();
        let load = loads.iter().sum::<i64>() as f64;
        panes.push(Pane {
            start,
            share: (!loads.is_empty()).then_some(load / (rating * 1000) as f64),
            coverage: loads.len() as f64 / group.hosts.len() as f64,
        });
        start += length;
    }
    panes
}

/// What a host puts on the feed, by second; seconds without a sample are absent.
fn milliwatts(log: &Log<'_>, host: &str, key: &str) -> BTreeMap<i64, i64> {
    let mut samples: BTreeMap<i64, BTreeMap<&str, Vec<i64>>> = BTreeMap::new();
    let mut feeds = 1;
    for batch in log.of_host(host) {
        let keys = keys(&batch.labels);
        if !keys.iter().any(|of_host| of_host == key) {
            continue;
        }
        feeds = keys.len() as i64;
        for block in &batch.gpus {
            for (tick, milliwatts) in block.readings(Metric::PowerDraw) {
                let second = batch.tick_at(tick).div_euclid(SECOND) * SECOND;
                samples.entry(second).or_default().entry(&block.gpu_uuid).or_default().push(milliwatts);
            }
        }
    }
    let of_second = |gpus: BTreeMap<&str, Vec<i64>>| gpus.values().map(|values| floor_mean(values)).sum::<i64>();
    samples.into_iter().map(|(second, gpus)| (second, of_second(gpus).div_euclid(feeds))).collect()
}

fn floor_mean(values: &[i64]) -> i64 {
    values.iter().sum::<i64>().div_euclid(values.len() as i64)
}

fn episodes(panes: &[Pane], config: &DetectorsConfig) -> Vec<Episode> {
    let rule = &config.feed_over_rating;
    let (open_panes, clear_panes) = (rule.open_panes.max(1) as usize, rule.clear_panes.max(1) as usize);
    let over = |pane: &Pane| pane.share.is_some_and(|share| share > rule.open_share);
    let critical = |pane: &Pane| pane.share.is_some_and(|share| share >= rule.critical_share);
    let calm =
        |pane: &Pane| pane.share.is_some_and(|share| share < rule.clear_share) && pane.coverage >= rule.least_coverage;
    let run = |from: usize, length: usize, holds: &dyn Fn(&Pane) -> bool| {
        (from..panes.len()).find(|i| panes.get(*i..*i + length).is_some_and(|run| run.iter().all(holds)))
    };
    let mut episodes = Vec::new();
    let mut from = 0;
    while let Some(first) = run(from, open_panes, &over) {
        let clear = run(first + open_panes, clear_panes, &calm);
        let behind = clear.unwrap_or(panes.len());
        let worst_is_critical = panes[first..behind].iter().any(critical);
        episodes.push(Episode {
            onset_at: panes[first].start,
            end_at: clear.map(|i| panes[i].start),
            resolved_at: clear.map(|i| panes[i + clear_panes - 1].start + rule.pane),
            severity: if worst_is_critical { Severity::Critical } else { Severity::Warning },
            code: None,
        });
        from = clear.map_or(panes.len(), |i| i + clear_panes);
    }
    episodes
}
