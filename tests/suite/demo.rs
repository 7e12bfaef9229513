//! The demo as a person runs it: what it finds is what it planted, for any seed and size, and only with every detector.

use gpufleet_tests::lake::number;
use gpufleet_tests::programs::run;
use serde_json::Value;

fn demo(lake: &std::path::Path, more: &[&str]) -> (i32, Value, String) {
    let lake = lake.to_str().expect("a path");
    let arguments = [&["demo", "--for", "1s", "--lake", lake, "--format", "json"], more].concat();
    let done = run("gpufleet", &arguments, std::path::Path::new("."));
    let report = done.stdout.lines().last().and_then(|line| serde_json::from_str(line).ok()).unwrap_or(Value::Null);
    (done.code, report, done.stderr)
}

#[test]
fn what_is_found_is_what_was_planted_for_every_seed_and_size() {
    let folder = tempfile::tempdir().expect("a folder");
    for (seed, gpus) in [("1", "64"), ("2", "8"), ("3", "24"), ("4", "128"), ("5", "16"), ("1", "512")] {
        let (code, report, said) =
            demo(&folder.path().join(format!("{seed}-{gpus}")), &["--seed", seed, "--gpus", gpus]);
        assert_eq!(code, 0, "seed {seed}, {gpus} GPUs: {said}");
        let list = |name: &str| report[name].as_array().cloned().unwrap_or_default();
        let kinds = |name: &str| {
            let mut kinds: Vec<_> =
                list(name).iter().map(|entry| (entry["kind"].to_string(), entry["gpu"].to_string())).collect();
            kinds.sort();
            kinds
        };
        assert_eq!(kinds("planted"), kinds("found"));
        assert!(list("planted").len() >= 6 && list("decoys").len() >= 7);
        assert_eq!(report["samples_acked"], report["rows_in_lake"]);
        assert_eq!(report["dead_letters"], 0);
        assert!(report["events_acked"].as_i64().is_some_and(|events| events >= 6));
    }
}

#[test]
fn without_any_one_detector_the_demo_is_unhealthy() {
    let folder = tempfile::tempdir().expect("a folder");
    for kind in ["xid", "ecc_uncorrectable", "ecc_rate", "thermal_throttle"] {
        let (code, report, said) = demo(&folder.path().join(kind), &["--gpus", "8", "--disable", kind]);
        assert_eq!(code, 1, "{kind}: {said}");
        assert!(said.contains(&format!("missed {kind}")), "{said}");
        assert!(report["found"].as_array().is_some_and(|found| found.iter().all(|found| found["kind"] != kind)));
    }
}

#[test]
fn two_runs_in_one_lake_keep_all_rows_and_double_none() {
    let folder = tempfile::tempdir().expect("a folder");
    let lake = folder.path().join("lake");
    let runs: Vec<Value> = (0..2).map(|_| demo(&lake, &["--gpus", "8"]).1).collect();
    let samples: i64 = runs.iter().map(|run| run["samples_acked"].as_i64().expect("a number")).sum();
    assert_eq!(number(&lake, "SELECT count(*) FROM gpu_samples"), samples);
    let key = "log_id, partition, \"offset\", gpu_uuid, tick";
    assert_eq!(number(&lake, &format!("SELECT count(*) FROM (SELECT DISTINCT {key} FROM gpu_samples)")), samples);
    assert_eq!(
        number(&lake, "SELECT count(*) FROM (SELECT DISTINCT id, revision FROM incidents)"),
        number(&lake, "SELECT count(*) FROM incidents")
    );
    assert_eq!(runs[0]["planted"], runs[1]["planted"], "a seed gives the same faults");
}
