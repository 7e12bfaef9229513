//! `gpufleet-processor replay`: the same rules over the same range say the same, from the lake and from Kafka; a changed
//! threshold says what a hand calculation gives.

use std::path::Path;
use std::time::Duration;

use gpufleet_schemas::instant::{SECOND, text};
use gpufleet_schemas::metric::Metric;
use gpufleet_schemas::partition::partition_of;
use gpufleet_schemas::record::{GpuBatch, GpuBlock, Incident, Origin, Series, Telemetry, Tick};
use gpufleet_schemas::wire::Decoder;
use gpufleet_tests::detection::Detection;
use gpufleet_tests::kafka;
use gpufleet_tests::log::{Log, PARTITIONS};
use gpufleet_tests::programs::run;
use gpufleet_tests::random_log::{START, Shape, random_log};
use serde_json::Value;

const MINUTE: i64 = 60 * SECOND;

/// Detects on the log, and archives it into a lake in `folder`.
fn detect_and_archive(log: &Log, folder: &Path) -> String {
    Detection::start(log, folder, &["--until-idle"], None).wait_for_success();
    let lake = folder.join("lake").display().to_string();
    let mut arguments = vec!["archive".to_owned(), "--lake".to_owned(), lake.clone()];
    arguments.extend(log.arguments());
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let archived = run("gpufleet-processor", &arguments, folder);
    assert_eq!(archived.code, 0, "{archived}");
    lake
}

fn replay(folder: &Path, more: &[&str]) -> Value {
    let arguments = [&["replay", "--format", "json"], more].concat();
    let replayed = run("gpufleet-processor", &arguments, folder);
    assert_eq!(replayed.code, 0, "{replayed}");
    serde_json::from_str(&replayed.stdout).expect("one object")
}

fn nothing_differs(difference: &Value) {
    for side in ["opened", "closed", "moved"] {
        assert_eq!(difference[side], Value::Array(Vec::new()), "{difference:#}");
    }
    assert_eq!(difference["then"], difference["now"]);
}

fn incidents(log: &Log) -> Vec<Incident> {
    let decoder = Decoder::default();
    log.incidents().values().map(|bytes| decoder.incident(bytes).expect("an incident")).collect()
}

#[test]
fn the_same_rules_over_a_range_differ_in_nothing_from_the_lake_and_from_kafka() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut log = Log::create(kafka::shared().bootstrap());
    let shape = Shape { partitions: PARTITIONS, hosts: 8, ..Shape::default() };
    log.publish_records(&random_log(21, &shape).records, Duration::ZERO);
    let lake = detect_and_archive(&log, folder.path());
    let (from, to) = (START + 12 * MINUTE, START + 32 * MINUTE);
    let of = incidents(&log);
    let across = |edge: i64| {
        // Some revision that was decided before the edge says open, and nothing before it says resolved.
        let mut open = std::collections::BTreeMap::new();
        for incident in of.iter().filter(|incident| incident.decided_at <= edge) {
            open.insert(&incident.id, incident.end_at.is_none());
        }
        open.values().filter(|open| **open).count()
    };
    assert!(across(from) > 3 && across(to) > 3, "{} and {} are open across the edges", across(from), across(to));
    let range = ["--from", &text(from), "--to", &text(to)];
    let from_lake = replay(folder.path(), &[&["--lake", &lake][..], &range].concat());
    assert!(from_lake["then"].as_u64() >= Some(50), "{} incidents prove little", from_lake["then"]);
    nothing_differs(&from_lake);
    let partitions = PARTITIONS.to_string();
    let cluster = ["--brokers", &log.brokers, "--topic-prefix", &log.prefix, "--partitions", &partitions];
    let from_kafka = replay(folder.path(), &[&cluster[..], &range].concat());
    nothing_differs(&from_kafka);
    assert_eq!(from_kafka["then"], from_lake["then"]);
    nothing_differs(&replay(folder.path(), &["--lake", &lake]));
}

/// Two GPUs sampled once a second: from minute 5 to minute 10 the first is throttled in every tenth sample, the second in
/// all of them.
fn two_hot_gpus() -> Vec<(i32, Telemetry)> {
    let mut records = Vec::new();
    for second in 0..30 * 60 {
        let at = START + second * SECOND;
        let hot = (300..600).contains(&second);
        let block = |uuid: &str, throttled: bool| {
            let mut block =
                GpuBlock { gpu_uuid: uuid.into(), tier_ticks: [vec![0], vec![0], vec![]], ..GpuBlock::default() };
            block.series[Metric::ClocksEventReasons.index()] = Series::dense(vec![if throttled { 0x20 } else { 0 }]);
            block.series[Metric::TemperatureGpu.index()] = Series::dense(vec![80]);
            block
        };
        let origin =
            Origin { host: "hand".into(), boot_id: "b".into(), seq: second, observed_at: at, ..Origin::default() };
        let gpus = vec![block("GPU-tenth", hot && second % 10 == 0), block("GPU-all", hot)];
        let batch = GpuBatch { origin, ticks: vec![0], gpus, ..GpuBatch::default() };
        records.push((partition_of("hand", PARTITIONS), Telemetry::Batch(batch)));
        for partition in 0..PARTITIONS {
            records.push((partition, Telemetry::Tick(Tick { tick_at: at, writer: "test".into() })));
        }
    }
    records
}

#[test]
fn a_changed_threshold_changes_what_a_hand_calculation_says() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut log = Log::create(kafka::shared().bootstrap());
    log.publish_records(&two_hot_gpus(), Duration::ZERO);
    let lake = detect_and_archive(&log, folder.path());
    nothing_differs(&replay(folder.path(), &["--lake", &lake]));
    // A share of 0.1 is above 0.05 and below 0.2; a share of 1 is above both, and begins and ends with the same samples.
    std::fs::write(folder.path().join("higher.toml"), "[thermal_throttle]\nwarning_share = 0.2\n").expect("writes");
    let higher = replay(folder.path(), &["--lake", &lake, "--detectors", "higher.toml"]);
    assert_eq!((higher["then"].as_u64(), higher["now"].as_u64()), (Some(2), Some(1)), "{higher:#}");
    assert_eq!(higher["opened"], Value::Array(Vec::new()));
    assert_eq!(higher["moved"], Value::Array(Vec::new()));
    let closed = &higher["closed"];
    assert_eq!(closed.as_array().map(Vec::len), Some(1));
    assert_eq!(closed[0]["gpu_uuid"], "GPU-tenth");
    assert_eq!(closed[0]["onset_at"], text(START + 300 * SECOND));
    assert_eq!(closed[0]["end_at"], text(START + 590 * SECOND));
    // The clear span: three minutes less, and the incident is known to be over three minutes earlier; it ended when it did.
    std::fs::write(folder.path().join("shorter.toml"), "[thermal_throttle]\nclear = \"2m\"\n").expect("writes");
    let before_the_end = text(START + 600 * SECOND + 4 * MINUTE);
    let shorter = replay(folder.path(), &["--lake", &lake, "--detectors", "shorter.toml", "--to", &before_the_end]);
    assert_eq!(shorter["moved"].as_array().map(Vec::len), Some(2), "{shorter:#}");
    for moved in shorter["moved"].as_array().expect("a list") {
        let last = if moved["now"]["gpu_uuid"] == "GPU-tenth" { 590 } else { 599 };
        assert_eq!(moved["then"]["end_at"], Value::Null);
        assert_eq!(moved["now"]["end_at"], text(START + last * SECOND));
    }
    let readable = run("gpufleet-processor", &["replay", "--lake", &lake, "--detectors", "higher.toml"], folder.path());
    assert!(readable.stdout.contains("0 opened, 1 closed, 0 moved"), "{readable}");
    let refused = run("gpufleet-processor", &["replay", "--lake", "nowhere"], folder.path());
    assert_eq!(refused.code, 3, "{refused}");
}
