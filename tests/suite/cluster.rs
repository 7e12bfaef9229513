//! A real cluster: its topics, what it refuses, and the demo on it.

use gpufleet_tests::kafka;
use gpufleet_tests::log::Log;
use gpufleet_tests::programs::run;

#[test]
fn topics_are_created_once_verified_after_and_a_difference_is_told() {
    let broker = kafka::shared();
    let folder = tempfile::tempdir().expect("a folder");
    let prefix = format!("apply-{}.", &uuid::Uuid::new_v4().simple().to_string()[..8]);
    let apply = |partitions: &str| {
        let arguments =
            ["topics", "apply", "--brokers", broker.bootstrap(), "--topic-prefix", &prefix, "--partitions", partitions];
        run("gpufleet", &arguments, folder.path())
    };
    let created = apply("3");
    assert_eq!(
        (created.code, created.stdout.matches("created").count()),
        (0, 4),
        "{}{}",
        created.stdout,
        created.stderr
    );
    let verified = apply("3");
    assert_eq!((verified.code, verified.stdout.matches("verified").count()), (0, 4), "{}", verified.stdout);
    let differs = apply("5");
    assert_eq!(differs.code, 1, "{}", differs.stdout);
    assert!(differs.stdout.contains("gpu.telemetry: 3 partitions, wanted 5"), "{}", differs.stdout);
}

#[test]
fn a_partition_count_that_does_not_match_refuses_to_start() {
    let log = Log::create(kafka::shared().bootstrap());
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(
        folder.path().join("smi.csv"),
        "timestamp, index, temperature.gpu\n2026/03/02 09:00:00.112, 0, 45\n",
    )
    .expect("writes");
    for (name, command) in [
        ("gpufleet-collector", vec!["publish", "smi.csv"]),
        ("gpufleet-processor", vec!["detect", "--snapshots", "s", "--partials", "2"]),
    ] {
        let more = ["--brokers", &log.brokers, "--topic-prefix", &log.prefix, "--partitions", "7"];
        let refused = run(name, &[&command[..], &more[..]].concat(), folder.path());
        assert_eq!(refused.code, 3, "{}", refused.stderr);
        assert!(refused.stderr.contains("has 4 partitions but --partitions says 7"), "{}", refused.stderr);
        let missing = ["--brokers", &log.brokers, "--topic-prefix", "nowhere.", "--partitions", "4"];
        let refused = run(name, &[&command[..], &missing[..]].concat(), folder.path());
        assert_eq!(refused.code, 3, "{}", refused.stderr);
        assert!(refused.stderr.contains("gpufleet topics apply"), "{}", refused.stderr);
    }
}

#[test]
fn the_demo_finds_what_it_planted_on_a_real_cluster_too() {
    let folder = tempfile::tempdir().expect("a folder");
    let brokers = kafka::shared().bootstrap();
    let arguments = ["demo", "--for", "3s", "--gpus", "16", "--brokers", brokers, "--lake", "lake", "--format", "json"];
    let done = run("gpufleet", &arguments, folder.path());
    assert_eq!(done.code, 0, "{}", done.stderr);
    let report: serde_json::Value = serde_json::from_str(done.stdout.lines().last().expect("a line")).expect("JSON");
    assert_eq!(report["planted"].as_array().map(Vec::len), report["found"].as_array().map(Vec::len));
    assert_eq!(report["samples_acked"], report["rows_in_lake"]);
}
