//! Partials: each host's part in its groups, for stage 2, which sees whole jobs, feeds and racks.
//!
//! Per pane and host one record for every power domain that the host draws from. A pane is sent when the watermark has
//! passed it, and again when a late record has changed it. Integers only: the order of arrival leaves no trace. Jobs and
//! racks come in with the detectors that read them.

use std::collections::{BTreeMap, BTreeSet};

use gpufleet_schemas::instant::SECOND;
use gpufleet_schemas::metric::Metric;
use gpufleet_schemas::record::{GpuBatch, GpuBlock, GroupKind, Partial};
use serde::{Deserialize, Serialize};

use crate::engine::GpuId;
use crate::engine::finding::Offsets;

/// Sum and count of one GPU's power readings in each second of a pane.
type Seconds = Vec<(i64, i64)>;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct HostPane {
    gpus: BTreeMap<GpuId, Seconds>,
    site: Option<String>,
    feeds: Vec<String>,
    offsets: Offsets,
}

/// The panes of all hosts of a partition that may still change.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Partials {
    pane: i64,
    panes: BTreeMap<(i64, String), HostPane>,
    /// Panes that were changed since they were sent.
    changed: BTreeSet<(i64, String)>,
    floor: i64,
    pub too_late: u64,
}

/// Key of a power domain, as topology names it.
fn feed_key(site: Option<&String>, feed: &str) -> String {
    site.map_or_else(|| feed.to_owned(), |site| format!("{site}/{feed}"))
}

impl Partials {
    pub fn new(pane: i64) -> Partials {
        Partials { pane, panes: BTreeMap::new(), changed: BTreeSet::new(), floor: i64::MIN, too_late: 0 }
    }

    /// Length of a pane.
    pub fn pane(&self) -> i64 {
        self.pane
    }

    pub fn block(&mut self, gpu: GpuId, batch: &GpuBatch, block: &GpuBlock, offset: i64) {
        if batch.labels.feeds.is_empty() {
            return;
        }
        let seconds = usize::try_from(self.pane / SECOND).unwrap_or(1);
        let mut newest: Option<(i64, &mut Seconds)> = None;
        for (tick, milliwatts) in block.readings(Metric::PowerDraw) {
            let at = batch.tick_at(tick);
            let start = at.div_euclid(self.pane) * self.pane;
            if start.saturating_add(self.pane) <= self.floor {
                self.too_late += 1;
                continue;
            }
            if newest.as_ref().is_none_or(|(pane, _)| *pane != start) {
                let key = (start, batch.origin.host.clone());
                self.changed.insert(key.clone());
                let pane = self.panes.entry(key).or_default();
                pane.offsets.include(offset);
                if pane.feeds != batch.labels.feeds || pane.site != batch.labels.site {
                    pane.feeds.clone_from(&batch.labels.feeds);
                    pane.site.clone_from(&batch.labels.site);
                }
                newest = Some((start, pane.gpus.entry(gpu).or_insert_with(|| vec![(0, 0); seconds])));
            }
            let second = usize::try_from((at - start) / SECOND).unwrap_or(usize::MAX);
            if let Some((sum, count)) = newest.as_mut().and_then(|(_, seconds)| seconds.get_mut(second)) {
                *sum = sum.saturating_add(milliwatts);
                *count += 1;
            }
        }
    }

    /// Gives what is new at watermark `now`, in the order of panes and hosts, and forgets what is final.
    pub fn advance(&mut self, now: i64, floor: i64, mut send: impl FnMut(Partial)) {
        let due: Vec<(i64, String)> =
            self.changed.iter().take_while(|(start, _)| start + self.pane <= now).cloned().collect();
        for key in due {
            if let Some(pane) = self.panes.get(&key) {
                for feed in &pane.feeds {
                    send(partial(&key, pane, feed, self.pane));
                }
            }
            self.changed.remove(&key);
        }
        self.floor = self.floor.max(floor);
        while let Some(entry) = self.panes.first_entry() {
            if entry.key().0 + self.pane > self.floor || self.changed.contains(entry.key()) {
                break;
            }
            entry.remove();
        }
    }
}

fn partial((pane_at, host): &(i64, String), pane: &HostPane, feed: &str, length: i64) -> Partial {
    let share = i64::try_from(pane.feeds.len()).unwrap_or(1).max(1);
    let milliwatts = (0..usize::try_from(length / SECOND).unwrap_or(1))
        .map(|second| {
            let read = pane.gpus.values().filter_map(|gpu| gpu.get(second)).filter(|(_, count)| *count > 0);
            let means = read.map(|(sum, count)| sum.div_euclid(*count));
            means.reduce(i64::saturating_add).map(|sum| sum.div_euclid(share))
        })
        .collect();
    Partial {
        group: GroupKind::PowerDomain,
        key: feed_key(pane.site.as_ref(), feed),
        host: host.clone(),
        pane_at: *pane_at,
        gpus: i32::try_from(pane.gpus.len()).unwrap_or(i32::MAX),
        samples: pane.gpus.values().flatten().map(|(_, count)| count).sum(),
        milliwatts,
        first_offset: pane.offsets.first,
        last_offset: pane.offsets.last,
        ..Partial::default()
    }
}
