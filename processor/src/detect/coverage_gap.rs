//! `coverage_gap`: a part of the log was not looked at, so that silence about it means nothing.
//!
//! Two ways into it: the log's start overtook the task (retention, after a long stop), and records that cannot be
//! decoded, when they are more than a share of a minute's records. Both are about a partition of the log, not a host.

use std::collections::BTreeMap;

use gpufleet_schemas::instant::SECOND;
use gpufleet_schemas::record::{Evidence, Severity};
use serde::{Deserialize, Serialize};

use super::Detector;
use super::config::CoverageGapConfig;
use crate::engine::book::TaskId;
use crate::engine::finding::Offsets;
use crate::engine::{Entities, Entity, Finding, Section, StateError};

const MINUTE: i64 = 60 * SECOND;

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Minute {
    records: i64,
    undecodable: i64,
    offsets: Offsets,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Gap {
    onset_at: Option<i64>,
    last_at: i64,
    end_at: Option<i64>,
    records: i64,
    share: f64,
    offsets: Offsets,
}

#[derive(Default, Serialize, Deserialize)]
struct Known {
    now: Option<i64>,
    /// The minute that is being counted, by the watermark when its records were read.
    minute: Minute,
    lost: BTreeMap<i64, Gap>,
    undecodable: Option<Gap>,
}

/// The detector.
pub struct CoverageGap {
    config: CoverageGapConfig,
    partition: String,
    known: Known,
}

impl CoverageGap {
    pub fn new(config: &CoverageGapConfig, task: &TaskId) -> CoverageGap {
        let partition = format!("{}/{}", task.topic, task.partition);
        CoverageGap { config: config.clone(), partition, known: Known::default() }
    }

    fn close_minute(&mut self, minute: i64) {
        let Minute { records, undecodable, offsets } = std::mem::take(&mut self.known.minute);
        let share = undecodable as f64 / records.max(1) as f64;
        if undecodable >= i64::from(self.config.least_undecodable) && share > self.config.undecodable_share {
            let gap = self.known.undecodable.get_or_insert(Gap {
                onset_at: Some(minute),
                last_at: minute,
                end_at: None,
                records: 0,
                share: 0.0,
                offsets: Offsets::default(),
            });
            if gap.end_at.take().is_some() {
                gap.onset_at = Some(minute);
                gap.records = 0;
            }
            gap.last_at = minute + MINUTE;
            gap.records += undecodable;
            gap.share = gap.share.max(share);
            gap.offsets.merge(offsets);
        }
    }
}

impl Detector for CoverageGap {
    fn kind(&self) -> &'static str {
        "coverage_gap"
    }

    fn looked_at(&mut self, offset: i64, undecodable: bool) {
        let minute = &mut self.known.minute;
        minute.records += 1;
        if undecodable {
            minute.undecodable += 1;
            minute.offsets.include(offset);
        }
    }

    fn gap(&mut self, from: i64, to: i64) {
        let (onset_at, mut offsets) = (self.known.now, Offsets::default());
        offsets.include(from);
        offsets.include(to - 1);
        let last_at = onset_at.unwrap_or(i64::MIN);
        let gap = Gap { onset_at, last_at, end_at: None, records: to - from, share: 1.0, offsets };
        self.known.lost.insert(from, gap);
    }

    fn advance(&mut self, now: i64, floor: i64, _: &Entities, findings: &mut Vec<Finding>) -> bool {
        let before = self.known.now.replace(now).unwrap_or(now);
        if before.div_euclid(MINUTE) < now.div_euclid(MINUTE) {
            self.close_minute(before.div_euclid(MINUTE) * MINUTE);
        }
        for gap in self.known.lost.values_mut() {
            // The first instant after the gap is where looking began again.
            gap.onset_at.get_or_insert(now);
            gap.end_at.get_or_insert(now);
        }
        if let Some(gap) = &mut self.known.undecodable
            && now - gap.last_at >= self.config.clear
        {
            gap.end_at.get_or_insert(gap.last_at);
        }
        for (from, gap) in &self.known.lost {
            findings.push(finding(&self.partition, &format!("lost from {from}"), gap, Severity::Major));
        }
        if let Some(gap) = &self.known.undecodable {
            findings.push(finding(&self.partition, "undecodable", gap, Severity::Warning));
        }
        let over = |gap: &Gap| gap.end_at.is_some_and(|end| end <= floor);
        self.known.lost.retain(|_, gap| !over(gap));
        self.known.undecodable.take_if(|gap| over(gap));
        true
    }

    fn save(&self) -> Section {
        Section::of(self.kind(), 1, &self.known)
    }

    fn load(&mut self, section: &Section) -> Result<(), StateError> {
        self.known = section.read(1)?;
        Ok(())
    }
}

fn finding(partition: &str, facet: &str, gap: &Gap, severity: Severity) -> Finding {
    let onset_at = gap.onset_at.unwrap_or(gap.last_at);
    let (summary, statistic, action) = if facet == "undecodable" {
        (
            format!(
                "{partition}: {} records cannot be decoded, {:.0} % of a minute; what they reported was not looked at",
                gap.records,
                gap.share * 100.0
            ),
            "share of a minute's records that cannot be decoded",
            "look at the dead letters for who writes them and why",
        )
    } else {
        (
            format!(
                "{partition}: the log has lost offsets {} to {}, {} records that detection never saw",
                gap.offsets.first, gap.offsets.last, gap.records
            ),
            "records lost before they were read",
            "keep detection running, or the log for longer than detection may stand still",
        )
    };
    Finding {
        kind: "coverage_gap",
        cause: None,
        subject: String::new(),
        facet: facet.to_owned(),
        entity: Entity { host: partition.to_owned(), ..Entity::default() },
        severity,
        onset_at,
        end_at: gap.end_at,
        late: false,
        code: None,
        statistic,
        value: if facet == "undecodable" { gap.share } else { gap.records as f64 },
        threshold: 0.0,
        count: gap.records,
        summary,
        actions: vec![
            action.to_owned(),
            "read the lake for that time: the archive may have what detection lacks".to_owned(),
        ],
        evidence: vec![Evidence {
            at: onset_at,
            name: "records".to_owned(),
            value: gap.records,
            before: None,
            reset: false,
        }],
        coverage: Some(if facet == "undecodable" { 1.0 - gap.share } else { 0.0 }),
        raw: None,
        offsets: gap.offsets,
    }
}
