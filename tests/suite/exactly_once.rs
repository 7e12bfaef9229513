//! On real Apache Kafka: every acknowledged sample is one row, and every incident is out once, also when archive and
//! detection are killed where it hurts most.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use gpufleet_tests::kafka;
use gpufleet_tests::lake::{ask, number};
use gpufleet_tests::log::{Busy, Log};
use gpufleet_tests::programs::program;

const KEY: &str = "log_id, topic, partition, \"offset\", gpu_uuid, tick";

fn processor(role: &str, log: &Log, more: &[&str], failpoint: Option<(&str, &Path)>) -> Output {
    let mut command = Command::new(program("gpufleet-processor"));
    command.arg(role).args(log.arguments()).args(more).stdin(Stdio::null());
    if role == "detect" {
        command
            .args(["--instance", "only"])
            .args(log.detect_arguments(&std::env::temp_dir().join("gpufleet-test-snapshots")));
    }
    // Neither a zone nor the wall clock may change a byte.
    command.env("TZ", "Pacific/Kiritimati").env("GPUFLEET_LOG", "warn").env_remove("GPUFLEET_FAILPOINT");
    if let Some((point, proof)) = failpoint {
        command.env("GPUFLEET_FAILPOINT", format!("{point}={}", proof.display()));
    }
    command.output().expect("the processor runs")
}

/// Runs a role until the failpoint kills it, sees the proof, and runs it again to the end.
fn killed_and_run_again(role: &str, log: &Log, more: &[&str], point: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let proof = folder.path().join("proof");
    let killed = processor(role, log, more, Some((point, &proof)));
    use std::os::unix::process::ExitStatusExt;
    let said = String::from_utf8_lossy(&killed.stderr).into_owned();
    assert_eq!(killed.status.signal(), Some(9), "{role} was not killed at {point}: {said}");
    let name = point.split(':').next().expect("a name");
    assert_eq!(std::fs::read_to_string(&proof).expect("the failpoint left its proof"), name);
    finishes(role, log, more);
}

fn finishes(role: &str, log: &Log, more: &[&str]) {
    let done = processor(role, log, more, None);
    assert!(done.status.success(), "{role}: {}", String::from_utf8_lossy(&done.stderr));
}

fn archive(lake: &Path) -> [String; 4] {
    ["--lake".into(), lake.display().to_string(), "--flush-rows".into(), "20000".into()]
}

fn check_rows(lake: &Path, log: &Log) {
    let (samples, events) = (i64::try_from(log.samples).unwrap(), i64::try_from(log.events).unwrap());
    assert_eq!(number(lake, "SELECT count(*) FROM gpu_samples"), samples);
    assert_eq!(number(lake, &format!("SELECT count(*) FROM (SELECT DISTINCT {KEY} FROM gpu_samples)")), samples);
    assert_eq!(number(lake, "SELECT count(*) FROM xid_events"), events);
    assert_eq!(
        number(lake, "SELECT count(*) FROM (SELECT DISTINCT log_id, partition, \"offset\" FROM xid_events)"),
        events
    );
    assert_eq!(number(lake, "SELECT count(*) FROM (SELECT DISTINCT host, boot_id, seq FROM xid_events)"), events);
    let incidents = i64::try_from(log.incidents().len()).unwrap();
    assert_eq!(number(lake, "SELECT count(*) FROM incidents"), incidents);
    assert_eq!(number(lake, "SELECT count(*) FROM (SELECT DISTINCT id, revision FROM incidents)"), incidents);
    assert_eq!(ask(lake, "SELECT reason FROM losses"), Vec::<serde_json::Value>::new());
}

#[test]
fn rows_equal_acknowledged_samples_however_the_archive_is_killed() {
    let mut log = Log::create(kafka::shared().bootstrap());
    log.publish(&mut Busy::new(7, 16, 625, 1000));
    assert!(log.samples >= 95_000 && log.events >= 1000, "{} samples, {} events", log.samples, log.events);
    finishes("detect", &log, &[]);
    assert_eq!(log.incidents(), log.replay(), "detection equals a replay, byte for byte");
    let folder = tempfile::tempdir().expect("a folder");
    for (name, point) in [
        ("clean", None),
        ("before-upload", Some("archive.before_upload:2")),
        ("after-upload", Some("archive.after_upload:2")),
        ("after-first-commit", Some("archive.after_commit")),
        ("after-commit", Some("archive.after_commit:6")),
    ] {
        let lake = folder.path().join(name);
        let arguments = archive(&lake);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        match point {
            Some(point) => killed_and_run_again("archive", &log, &arguments, point),
            None => finishes("archive", &log, &arguments),
        }
        check_rows(&lake, &log);
        // Once more over the same log changes nothing.
        finishes("archive", &log, &arguments);
        check_rows(&lake, &log);
    }
}

#[test]
fn incidents_equal_an_offline_replay_however_detection_is_killed() {
    for (seed, point) in [
        (1, "detect.before_acknowledgement"),
        (2, "detect.before_acknowledgement:4"),
        (3, "detect.after_acknowledgement:2"),
    ] {
        let mut log = Log::create(kafka::shared().bootstrap());
        log.publish(&mut Busy::new(seed, 8, 900, 100));
        killed_and_run_again("detect", &log, &[], point);
        let (found, replayed) = (log.incidents(), log.replay());
        assert!(found.len() >= 10, "{} incidents are too few to prove anything", found.len());
        assert_eq!(found, replayed, "{point}");
        finishes("detect", &log, &[]);
        assert_eq!(log.incidents(), replayed, "another run adds nothing");
    }
}

#[test]
fn a_repeated_record_is_one_row_and_is_counted() {
    let mut log = Log::create(kafka::shared().bootstrap());
    log.publish(&mut Busy::new(5, 8, 60, 10));
    let (samples, events) = (log.samples, log.events);
    log.publish(&mut Busy::new(5, 8, 60, 10));
    let folder = tempfile::tempdir().expect("a folder");
    let lake = folder.path().join("lake");
    finishes("archive", &log, &["--lake", lake.to_str().expect("a path")]);
    assert_eq!(number(&lake, "SELECT count(*) FROM gpu_samples"), i64::try_from(samples).unwrap());
    assert_eq!(number(&lake, "SELECT count(*) FROM xid_events"), i64::try_from(events).unwrap());
    // 8 GPUs are one host with two batches a second; every record of the second run is a repeat.
    let repeats = number(&lake, "SELECT sum(count) FROM losses WHERE reason = 'duplicate' AND stage = 'archive'");
    assert_eq!(repeats, 120 + i64::try_from(events).unwrap());
}
