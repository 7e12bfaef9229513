//! Detection on real Apache Kafka under faults: kills at every failpoint, rebalance storms, zombies, brokers that die,
//! networks that are cut. In the end the incidents are those of a run over the log that knows no fault, byte for byte.

use std::path::Path;
use std::time::{Duration, Instant};

use gpufleet_runtime::kafka::offsets;
use gpufleet_schemas::record::State;
use gpufleet_schemas::wire::Decoder;
use gpufleet_tests::cluster::Cluster;
use gpufleet_tests::detection::Detection;
use gpufleet_tests::kafka;
use gpufleet_tests::lake::number;
use gpufleet_tests::log::{Log, PARTITIONS};
use gpufleet_tests::programs::run;
use gpufleet_tests::proxy::Fault;
use gpufleet_tests::random_log::{RandomLog, Shape, random_log};

/// Where a kill hurts: each side of sending, of being acknowledged, and of storing a snapshot.
const FAILPOINTS: [&str; 5] = [
    "detect.before_acknowledgement",
    "detect.after_acknowledgement",
    "detect.snapshot_taken",
    "detect.before_snapshot",
    "detect.after_snapshot",
];
/// Members of a group lose their partitions after so long a silence.
const SESSION: [&str; 2] = ["--session-timeout", "6s"];

/// A member with a name takes its partitions back at once, also after a kill.
const NAMED: [&str; 2] = ["--instance", "only"];
const OFTEN: [&str; 2] = ["--snapshot-every", "1ms"];

fn a_log(seed: u64) -> RandomLog {
    random_log(seed, &Shape { partitions: PARTITIONS, ..Shape::default() })
}

/// Runs detection until the log is idle.
fn finish(log: &Log, folder: &Path) {
    Detection::start(log, folder, &["--until-idle"], None).wait_for_success();
}

/// At least twenty incidents, one of them open, one revised and one reopened.
fn proves_something(log: &Log) {
    let (incidents, _) = log.incidents_and_repeats();
    let decoder = Decoder::default();
    let mut lives: std::collections::BTreeMap<String, Vec<(i32, State)>> = std::collections::BTreeMap::new();
    for bytes in incidents.values() {
        let incident = decoder.incident(bytes).expect("an incident");
        lives.entry(incident.id).or_default().push((incident.revision, incident.state));
    }
    lives.values_mut().for_each(|life| life.sort());
    assert!(lives.len() >= 20, "{} incidents prove little", lives.len());
    assert!(lives.values().any(|life| life.last().is_some_and(|(_, state)| *state == State::Open)), "none is open");
    assert!(lives.values().any(|life| life.len() > 1), "none is revised");
    let reopened =
        |life: &Vec<(i32, State)>| life.windows(2).any(|pair| pair[0].1 == State::Resolved && pair[1].1 == State::Open);
    assert!(lives.values().any(reopened), "none is reopened");
}

#[test]
fn forty_kills_at_every_failpoint_leave_the_incidents_of_an_undisturbed_run() {
    let (mut kills, mut seed, mut at) = (0, 100, std::collections::BTreeMap::new());
    while kills < 40 {
        seed += 1;
        assert!(seed < 120, "only {kills} kills so far: {at:?}");
        let mut log = Log::create(kafka::shared().bootstrap());
        log.publish_records(&a_log(seed).records, Duration::ZERO);
        let folder = tempfile::tempdir().expect("a folder");
        for (round, failpoint) in FAILPOINTS.iter().cycle().take(10).enumerate() {
            let proof = folder.path().join(format!("proof-{round}"));
            // The second to fifth time, so that something has been done since the restart.
            let point = format!("{failpoint}:{}={}", 1 + (round as u64 * 7 + seed) % 4, proof.display());
            let (code, signal, said) =
                Detection::start(&log, folder.path(), &[&OFTEN[..], &NAMED].concat(), Some(&point)).wait();
            if signal == Some(9) {
                assert_eq!(&std::fs::read_to_string(&proof).expect("the failpoint left its proof"), failpoint);
                kills += 1;
                *at.entry(*failpoint).or_insert(0) += 1;
            } else {
                assert_eq!(code, Some(0), "{said}");
            }
        }
        Detection::start(&log, folder.path(), &[&["--until-idle"][..], &NAMED].concat(), None).wait_for_success();
        let (found, replayed) = (log.incidents(), log.replay());
        assert_eq!(found.keys().collect::<Vec<_>>(), replayed.keys().collect::<Vec<_>>(), "seed {seed}");
        assert!(found == replayed, "seed {seed}: the bytes differ");
        proves_something(&log);
    }
    println!("{kills} kills: {at:?}");
    assert_eq!(at.len(), FAILPOINTS.len(), "a failpoint was never reached: {at:?}");
}

#[test]
fn a_rebalance_storm_loses_and_contradicts_nothing() {
    storm(Duration::from_secs(16));
}

#[test]
#[ignore = "long: five minutes of rebalances"]
fn a_rebalance_storm_of_five_minutes_loses_and_contradicts_nothing() {
    storm(Duration::from_secs(300));
}

/// One member stays, others join, leave and are killed every two seconds, while the log grows.
fn storm(span: Duration) {
    let mut log = Log::create(kafka::shared().bootstrap());
    let folder = tempfile::tempdir().expect("a folder");
    let records = a_log(7).records;
    let stays = Detection::start(&log, folder.path(), &SESSION, None);
    let start = Instant::now();
    let mut joined = 0;
    std::thread::scope(|scope| {
        let publishing = scope.spawn(|| log_publish(&log, &records, span));
        while start.elapsed() < span {
            let guest = Detection::start(&log, folder.path(), &SESSION, None);
            std::thread::sleep(Duration::from_secs(2));
            joined += 1;
            if joined % 3 == 0 {
                guest.kill();
            } else {
                assert!(guest.stop() < Duration::from_secs(10), "a member drains within 10 s");
            }
        }
        publishing.join().expect("published");
    });
    stays.stop();
    finish(&log, folder.path());
    let ((found, repeats), replayed) = (log.incidents_and_repeats(), log.replay());
    println!("{joined} guests, {repeats} repeats among {} revisions", found.len());
    assert!(found == replayed, "{} revisions are out, {} are owed", found.len(), replayed.len());
    log.samples += 1;
    proves_something(&log);
}

/// Publishes with a writer of its own.
fn log_publish(log: &Log, records: &[(i32, gpufleet_schemas::record::Telemetry)], span: Duration) {
    let mut other =
        Log { brokers: log.brokers.clone(), prefix: log.prefix.clone(), topics: log.topics.clone(), ..*log };
    other.publish_records(records, span);
}

#[test]
fn a_frozen_process_that_comes_back_repeats_and_never_contradicts() {
    let log = Log::create(kafka::shared().bootstrap());
    let folder = tempfile::tempdir().expect("a folder");
    let records = a_log(8).records;
    let zombie = Detection::start(&log, folder.path(), &SESSION, None);
    std::thread::scope(|scope| {
        let publishing = scope.spawn(|| log_publish(&log, &records, Duration::from_secs(20)));
        std::thread::sleep(Duration::from_secs(5));
        zombie.signal("STOP");
        let heir = Detection::start(&log, folder.path(), &SESSION, None);
        // Longer than the session: the group gives the partitions away.
        std::thread::sleep(Duration::from_secs(10));
        zombie.signal("CONT");
        publishing.join().expect("published");
        std::thread::sleep(Duration::from_secs(2));
        heir.stop();
    });
    zombie.stop();
    finish(&log, folder.path());
    let ((found, repeats), replayed) = (log.incidents_and_repeats(), log.replay());
    println!("{repeats} repeats among {} revisions", found.len());
    assert!(found == replayed, "{} revisions are out, {} are owed", found.len(), replayed.len());
    proves_something(&log);
}

#[test]
fn brokers_that_die_bounce_and_are_cut_off_lose_nothing() {
    let mut cluster = Cluster::start().unwrap_or_else(|sentence| panic!("{sentence}"));
    let mut log = Log::replicated(&cluster.bootstrap(), 3);
    let folder = tempfile::tempdir().expect("a folder");
    let lake = folder.path().join("lake");
    let records = a_log(9).records;
    let detection = Detection::start(&log, folder.path(), &SESSION, None);
    std::thread::scope(|scope| {
        let publishing = scope.spawn(|| log_publish(&log, &records, Duration::from_secs(40)));
        std::thread::sleep(Duration::from_secs(3));
        cluster.kill(0);
        std::thread::sleep(Duration::from_secs(3));
        cluster.restart(0).expect("restarts");
        cluster.proxy(1).set(Fault::Cut);
        std::thread::sleep(Duration::from_secs(2));
        cluster.proxy(1).set(Fault::Delay(Duration::from_millis(200)));
        cluster.proxy(2).set(Fault::Slow { bytes_per_second: 200_000 });
        std::thread::sleep(Duration::from_secs(3));
        cluster.proxy(1).set(Fault::HalfOpen);
        std::thread::sleep(Duration::from_secs(2));
        cluster.proxy(1).set(Fault::None);
        cluster.proxy(2).set(Fault::Reset { every_bytes: 60_000 });
        std::thread::sleep(Duration::from_secs(2));
        cluster.proxy(2).set(Fault::None);
        for broker in 0..3 {
            cluster.stop(broker).expect("stops");
            cluster.restart(broker).expect("restarts");
            cluster.wait_until_whole(Duration::from_secs(60)).expect("whole");
        }
        publishing.join().expect("published");
    });
    // I6: caught up within 30 s of the last fault.
    let healed = Instant::now();
    detection.stop();
    finish(&log, folder.path());
    assert!(healed.elapsed() < Duration::from_secs(30), "caught up after {:?}", healed.elapsed());
    let ((found, repeats), replayed) = (log.incidents_and_repeats(), log.replay());
    println!("{repeats} repeats among {} revisions", found.len());
    assert!(found == replayed, "{} revisions are out, {} are owed", found.len(), replayed.len());
    proves_something(&log);
    // I4: a row for each acknowledged sample.
    for (_, record) in &records {
        if let gpufleet_schemas::record::Telemetry::Batch(batch) = record {
            log.samples += batch.sample_count() as u64;
        }
    }
    let arguments = log.arguments();
    let mut arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    arguments.splice(0..0, ["archive", "--lake", lake.to_str().expect("a path")]);
    let archived = run("gpufleet-processor", &arguments, folder.path());
    assert_eq!(archived.code, 0, "{archived}");
    assert_eq!(number(&lake, "SELECT count(*) FROM gpu_samples"), i64::try_from(log.samples).expect("few"));
}

#[test]
fn a_topic_that_was_made_anew_is_refused_and_so_is_one_that_has_grown() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let admin = gpufleet_tests::kafka::admin(kafka::shared().bootstrap());
    let options = rdkafka::admin::AdminOptions::new();
    let folder = tempfile::tempdir().expect("a folder");
    let mut log = Log::create(kafka::shared().bootstrap());
    log.publish_records(&a_log(3).records[..4000], Duration::ZERO);
    finish(&log, folder.path());
    // Made anew with as many other records: the offsets fit, the records do not.
    runtime.block_on(admin.delete_topics(&[&log.topics.telemetry], &options)).expect("deleted");
    let spec =
        rdkafka::admin::NewTopic::new(&log.topics.telemetry, PARTITIONS, rdkafka::admin::TopicReplication::Fixed(1));
    let start = Instant::now();
    while runtime.block_on(admin.create_topics([&spec], &options)).expect("asked")[0].is_err() {
        assert!(start.elapsed() < Duration::from_secs(20), "the topic is not made anew");
        std::thread::sleep(Duration::from_millis(200));
    }
    std::thread::sleep(Duration::from_secs(1));
    log.publish_records(&a_log(4).records[..6000], Duration::ZERO);
    let (code, _, said) = Detection::start(&log, folder.path(), &["--until-idle"], None).wait();
    assert_eq!(code, Some(3), "{said}");
    assert!(said.contains("deleted and made anew"), "{said}");

    let mut log = Log::create(kafka::shared().bootstrap());
    log.publish_records(&a_log(3).records[..2000], Duration::ZERO);
    let running = Detection::start(&log, folder.path(), &SESSION, None);
    std::thread::sleep(Duration::from_secs(3));
    let more = rdkafka::admin::NewPartitions::new(&log.topics.telemetry, 6);
    runtime.block_on(admin.create_partitions([&more], &options)).expect("grown");
    // Those that run learn of it with their next metadata; those that start, at once.
    let refused = Detection::start(&log, folder.path(), &["--until-idle"], None).wait();
    assert_eq!(refused.0, Some(3), "{}", refused.2);
    assert!(refused.2.contains("has 6 partitions but --partitions says 4"), "{}", refused.2);
    running.stop();
}

#[test]
fn what_retention_took_before_it_was_read_is_an_incident() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let admin = gpufleet_tests::kafka::admin(kafka::shared().bootstrap());
    let folder = tempfile::tempdir().expect("a folder");
    let mut log = Log::create(kafka::shared().bootstrap());
    let records = a_log(5).records;
    log.publish_records(&records[..4000], Duration::ZERO);
    finish(&log, folder.path());
    log.publish_records(&records[4000..], Duration::ZERO);
    let mut lost = rdkafka::TopicPartitionList::new();
    let ends = offsets(&log.brokers, &log.topics.telemetry, PARTITIONS).expect("offsets");
    for (partition, (_, high)) in (0..).zip(&ends) {
        let before = rdkafka::Offset::Offset(high - 300);
        lost.add_partition_offset(&log.topics.telemetry, partition, before).expect("added");
    }
    runtime.block_on(admin.delete_records(&lost, &rdkafka::admin::AdminOptions::new())).expect("deleted");
    finish(&log, folder.path());
    let decoder = Decoder::default();
    let gaps: Vec<_> = log
        .incidents()
        .values()
        .map(|bytes| decoder.incident(bytes).expect("an incident"))
        .filter(|incident| incident.kind == "coverage_gap" && incident.revision == 0)
        .collect();
    assert_eq!(gaps.len(), PARTITIONS as usize, "one for each partition");
    for gap in gaps {
        let (_, high) = ends[gap.host.rsplit('/').next().expect("a partition").parse::<usize>().expect("a number")];
        assert_eq!(gap.last_offset, high - 301, "{}", gap.summary);
        assert!(gap.summary.contains("detection never saw"), "{}", gap.summary);
    }
    finish(&log, folder.path());
}

#[test]
fn other_rules_take_over_and_are_rolled_back_without_a_loss() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut log = Log::create(kafka::shared().bootstrap());
    let records = a_log(6).records;
    let other = folder.path().join("detectors.toml");
    std::fs::write(&other, "[thermal_throttle]\nwarning_share = 0.2\n").expect("writes");
    let other = other.to_str().expect("a path");
    let third = records.len() / 3;
    log.publish_records(&records[..third], Duration::ZERO);
    finish(&log, folder.path());
    let before = log.incidents().len();
    log.publish_records(&records[third..2 * third], Duration::ZERO);
    Detection::start(&log, folder.path(), &["--until-idle", "--detectors", other], None).wait_for_success();
    let upgraded = log.incidents().len();
    log.publish_records(&records[2 * third..], Duration::ZERO);
    finish(&log, folder.path());
    let all = log.incidents();
    assert!(before > 0 && upgraded > before && all.len() > upgraded, "{before}, {upgraded}, {}", all.len());
    // What does not depend on the changed threshold is as if nothing had happened.
    let decoder = Decoder::default();
    let standing = |incidents: &std::collections::BTreeMap<(String, i64), Vec<u8>>| {
        let mut newest = std::collections::BTreeMap::new();
        for bytes in incidents.values() {
            let incident = decoder.incident(bytes).expect("an incident");
            if incident.kind != "thermal_throttle" {
                let life = (incident.kind, incident.onset_at, incident.end_at, incident.severity, incident.count);
                newest.insert(incident.id, life);
            }
        }
        newest
    };
    let (found, replayed) = (standing(&all), standing(&log.replay()));
    assert!(found.len() >= 20, "{} incidents prove little", found.len());
    assert_eq!(found, replayed);
}
