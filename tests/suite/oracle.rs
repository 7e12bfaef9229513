//! The engine against a naive reference that shares no deciding code with it: a hundred random logs, five kinds.

use std::collections::BTreeMap;

use gpufleet_processor::detect::DetectorsConfig;
use gpufleet_processor::replay::{Body, Rehearsal};
use gpufleet_schemas::record::{Incident, State, Telemetry};
use gpufleet_tests::oracle::{Expected, expect};
use gpufleet_tests::random_log::{RandomLog, Shape, random_log};

const LOGS: u64 = 100;

/// Every revision that both stages make of a log.
fn revisions(log: &RandomLog, partitions: i32, config: &DetectorsConfig) -> Vec<Incident> {
    let mut rehearsal = Rehearsal::new("oracle", "gpu.telemetry", config);
    for partition in 0..partitions {
        let mut stage = rehearsal.stage(partition);
        let records = log.records.iter().filter(|(of, _)| *of == partition);
        for (offset, (_, record)) in (0..).zip(records) {
            rehearsal.take(&mut stage, offset, None, &Body::Record(record.clone()));
        }
    }
    rehearsal.finish("fleet.partials")
}

/// Each incident as it stands at the end, in the oracle's words.
fn standing(revisions: &[Incident]) -> Vec<Expected> {
    let mut newest: BTreeMap<&str, &Incident> = BTreeMap::new();
    for incident in revisions {
        newest.insert(&incident.id, incident);
    }
    let kinds = ["ecc_rate", "ecc_uncorrectable", "feed_over_rating", "thermal_throttle", "xid"];
    let mut standing: Vec<Expected> = newest
        .into_values()
        .filter(|incident| !incident.summary.starts_with("withdrawn: "))
        .filter_map(|incident| {
            let kind = kinds.into_iter().find(|kind| *kind == incident.kind)?;
            let subject = match kind {
                "xid" => incident.pci.clone().or(incident.gpu_uuid.clone()),
                "feed_over_rating" => incident.feed.clone(),
                _ => incident.gpu_uuid.clone(),
            };
            let mut explains: Vec<_> =
                incident.explains.iter().map(|explained| (explained.kind.clone(), explained.code)).collect();
            explains.sort();
            Some(Expected {
                kind,
                host: incident.host.clone(),
                subject: subject.unwrap_or_default(),
                code: incident.code,
                severity: incident.severity,
                onset_at: incident.onset_at,
                end_at: incident.end_at,
                explains,
            })
        })
        .collect();
    standing.sort_by(|a, b| {
        let key = |e: &Expected| (e.kind, e.host.clone(), e.subject.clone(), e.code, e.onset_at);
        key(a).cmp(&key(b))
    });
    standing
}

/// A page without the name that it goes by: which member of one cause gives it depends on which was read first.
fn nameless(page: &Expected) -> Expected {
    if page.explains.is_empty() {
        return page.clone();
    }
    let mut explains = page.explains.clone();
    explains.push((page.kind.to_owned(), page.code));
    explains.sort();
    Expected { kind: "page", code: None, subject: String::new(), explains, ..page.clone() }
}

fn differences(seed: u64, shape: &Shape) -> (usize, Vec<String>) {
    let config = DetectorsConfig::default();
    let log = random_log(seed, shape);
    let records: Vec<Telemetry> = log.records.iter().map(|(_, record)| record.clone()).collect();
    let expected: Vec<Expected> = expect(&records, &config, log.until).iter().map(nameless).collect();
    let revisions = revisions(&log, shape.partitions, &config);
    let found: Vec<Expected> = standing(&revisions).iter().map(nameless).collect();
    let mut differences = Vec::new();
    for missing in expected.iter().filter(|expected| !found.contains(expected)) {
        differences.push(format!("seed {seed}: owed   {missing:?}"));
    }
    for extra in found.iter().filter(|found| !expected.contains(found)) {
        differences.push(format!("seed {seed}: extra  {extra:?}"));
    }
    assert!(expected.len() >= 20, "seed {seed}: a log of {} incidents proves little", expected.len());
    let reopened = |id: &str| {
        let states: Vec<State> = revisions.iter().filter(|i| i.id == id).map(|i| i.state).collect();
        states.windows(2).any(|pair| pair == [State::Resolved, State::Open])
    };
    assert!(expected.iter().any(|expected| expected.end_at.is_none()), "seed {seed}: none is open at the end");
    assert!(expected.iter().any(|expected| expected.end_at.is_some()), "seed {seed}: none is resolved");
    assert!(revisions.iter().any(|incident| incident.revision > 0), "seed {seed}: none is revised");
    assert!(revisions.iter().any(|incident| reopened(&incident.id)), "seed {seed}: none is reopened");
    (expected.len(), differences)
}

#[test]
fn a_naive_reference_finds_the_same_incidents_in_a_hundred_random_logs() {
    let shape = Shape::default();
    let (mut total, mut all) = (0, Vec::new());
    for seed in 0..LOGS {
        let (count, differences) = differences(seed, &shape);
        total += count;
        all.extend(differences);
    }
    println!("{total} incidents in {LOGS} logs");
    assert!(all.is_empty(), "{} differences:\n{}", all.len(), all.join("\n"));
}

#[test]
fn a_host_whose_clock_is_a_day_ahead_changes_nothing_for_others() {
    let (config, shape) = (DetectorsConfig::default(), Shape::default());
    let log = random_log(11, &shape);
    let undisturbed = standing(&revisions(&log, shape.partitions, &config));
    // The first host of the log is there twice: as itself, and as one whose clock is a day ahead.
    let day = 86_400_000_000;
    let mut disturbed = RandomLog { records: Vec::new(), until: log.until };
    for (partition, record) in &log.records {
        disturbed.records.push((*partition, record.clone()));
        let mut ahead = record.clone();
        if let Telemetry::Batch(batch) = &mut ahead {
            batch.gpus.iter_mut().for_each(|gpu| gpu.gpu_uuid.insert_str(0, "ahead of "));
            // It hangs on feeds of its own.
            batch.labels.site = Some("elsewhere".to_owned());
        }
        if let Telemetry::Event(event) = &mut ahead {
            event.gpu_uuid = None;
        }
        let origin = match &mut ahead {
            Telemetry::Batch(batch) => &mut batch.origin,
            Telemetry::Event(event) => &mut event.origin,
            Telemetry::Tick(_) | Telemetry::Topology(_) => continue,
        };
        if origin.host == "node-00" {
            origin.host = "ahead".to_owned();
            origin.observed_at += day;
            disturbed.records.push((*partition, ahead));
        }
    }
    assert!(disturbed.records.len() > log.records.len() + 500);
    let mut found = standing(&revisions(&disturbed, shape.partitions, &config));
    let own = found.extract_if(.., |incident| incident.host == "ahead").count();
    assert!(own > 0, "its Xids are told all the same");
    let missing: Vec<_> = undisturbed.iter().filter(|incident| !found.contains(incident)).collect();
    let extra: Vec<_> = found.iter().filter(|incident| !undisturbed.contains(incident)).collect();
    assert!(missing.is_empty() && extra.is_empty(), "missing {missing:#?}\nextra {extra:#?}");
}
