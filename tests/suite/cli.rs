//! The command lines: exit codes, and one clear sentence on stderr when something is wrong.
//!
//! Codes: 0 well, 2 usage, 3 configuration, 4 something outside. What the programs compute is tested elsewhere.

use std::fs;
use std::path::Path;

use gpufleet_tests::programs::{self, Output};
use serde_json::Value;
use tempfile::TempDir;

const PROGRAMS: [(&str, &[&str]); 3] = [
    ("gpufleet", &["demo", "import", "sql", "incidents", "topics"]),
    ("gpufleet-collector", &["run", "publish", "decode"]),
    ("gpufleet-processor", &["detect", "replay", "archive"]),
];
/// A log of nvidia-smi with two samples.
const CSV: &str = "timestamp, index, uuid, temperature.gpu, power.draw [W]
2026/03/02 09:00:00.112, 0, GPU-0a1b2c3d-0000-4000-8000-000000000001, 61, 688.12 W
2026/03/02 09:00:01.112, 0, GPU-0a1b2c3d-0000-4000-8000-000000000001, 62, 690.00 W
";
/// Nobody listens on this port.
const NOWHERE: &str = "127.0.0.1:1";

fn folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("smi.csv"), CSV).expect("a log can be written");
    folder
}

/// A folder with `smi.csv` and, of it, `lake`.
fn folder_with_lake() -> TempDir {
    let folder = folder();
    let output = run("gpufleet", &["import", "smi.csv", "--host", "node-07", "--lake", "lake"], folder.path());
    assert_eq!(output.code, 0, "{output}");
    folder
}

/// Runs a program; whatever it was given, it may not panic.
fn run(program: &str, args: &[&str], dir: &Path) -> Output {
    let output = programs::run(program, args, dir);
    assert!(!output.stderr.contains("panicked at") && output.code != 101, "{program} {args:?} panics: {output}");
    output
}

/// The command line is wrong: clap's answer, which names what is wrong.
fn refused_as_usage(program: &str, args: &[&str], dir: &Path, says: &[&str]) {
    let output = run(program, args, dir);
    assert_eq!(output.code, 2, "{program} {args:?}: {output}");
    assert!(output.stdout.is_empty(), "{program} {args:?}: talk belongs on stderr: {output}");
    for word in says {
        assert!(output.stderr.contains(word), "{program} {args:?} does not say {word}: {output}");
    }
}

/// Ends with `code` and one sentence that says each of `says`: lower case, no full stop, no debug text. Lines of a log
/// may come before it.
fn refused(program: &str, args: &[&str], dir: &Path, code: i32, says: &[&str]) {
    let output = run(program, args, dir);
    assert_eq!(output.code, code, "{program} {args:?}: {output}");
    assert!(output.stdout.is_empty(), "{program} {args:?}: talk belongs on stderr: {output}");
    let start = format!("{program}: ");
    let sentences: Vec<_> = output.stderr.lines().filter_map(|line| line.strip_prefix(&start)).collect();
    let [sentence] = sentences[..] else { panic!("{program} {args:?} says no one sentence: {output}") };
    assert_eq!(output.stderr.lines().last(), Some(format!("{start}{sentence}").as_str()), "the sentence is the end");
    for word in says {
        assert!(sentence.contains(word), "{program} {args:?} does not say {word}: {sentence}");
    }
    for debug in ["Error(", "Some(", "datafusion.", "Error during planning"] {
        assert!(!sentence.contains(debug), "{program} {args:?} shows its insides: {sentence}");
    }
    let mut first = sentence.chars();
    let capital = first.next().is_some_and(char::is_uppercase) && first.next().is_some_and(char::is_lowercase);
    assert!(!capital && !sentence.ends_with('.'), "{program} {args:?}: a fragment, not a text: {sentence}");
}

fn sql_refused(dir: &Path, query: &str, code: i32, says: &[&str]) {
    refused("gpufleet", &["sql", "--lake", "lake", query], dir, code, says);
}

fn samples(dir: &Path) -> String {
    let query = "SELECT count(*) AS n FROM gpu_samples";
    let output = run("gpufleet", &["sql", "--lake", "lake", "--format", "csv", query], dir);
    assert_eq!(output.code, 0, "{output}");
    output.stdout.lines().nth(1).unwrap_or_default().to_owned()
}

// --- Command lines -----------------------------------------------------------------------------------------------------

#[test]
fn help_names_every_command_and_every_command_has_help() {
    let folder = folder();
    for (program, commands) in PROGRAMS {
        let output = run(program, &["--help"], folder.path());
        assert_eq!(output.code, 0, "{output}");
        assert!(output.stderr.is_empty() && output.stdout.contains("Usage:"), "{output}");
        for command in commands {
            let listed = output.stdout.lines().any(|line| line.split_whitespace().next() == Some(command));
            assert!(listed, "{program} --help does not list {command}: {output}");
            let help = run(program, &[command, "--help"], folder.path());
            assert_eq!(help.code, 0, "{program} {command} --help: {help}");
            assert!(help.stdout.contains(&format!("Usage: {program} {command}")), "{help}");
        }
        let version = run(program, &["--version"], folder.path());
        assert_eq!((version.code, version.stdout.split(' ').next()), (0, Some(program)), "{version}");
    }
    let apply = run("gpufleet", &["topics", "apply", "--help"], folder.path());
    assert!(apply.code == 0 && apply.stdout.contains("--brokers"), "{apply}");
}

#[test]
fn unknown_flags_and_commands_are_usage() {
    let folder = folder();
    for (program, commands) in PROGRAMS {
        refused_as_usage(program, &["--nope"], folder.path(), &["--nope", "--help"]);
        refused_as_usage(program, &["nope"], folder.path(), &["nope", "--help"]);
        for command in commands {
            refused_as_usage(program, &[command, "--nope"], folder.path(), &["--nope"]);
        }
    }
    refused_as_usage("gpufleet", &["sql", "--lake", "lake"], folder.path(), &["<QUERY>"]);
    refused_as_usage("gpufleet", &["import"], folder.path(), &["<FILE>"]);
    refused_as_usage("gpufleet-collector", &["publish", "smi.csv"], folder.path(), &["--brokers"]);
}

#[test]
fn an_unknown_detector_cannot_be_switched_off() {
    let folder = folder();
    let says = ["nope", "thermal_throttle"];
    refused_as_usage("gpufleet", &["demo", "--disable", "nope"], folder.path(), &says);
    refused_as_usage("gpufleet", &["import", "smi.csv", "--disable", "nope"], folder.path(), &says);
    let detect = ["detect", "--snapshots", "s", "--brokers", NOWHERE, "--disable", "nope"];
    refused_as_usage("gpufleet-processor", &detect, folder.path(), &says);
}

#[test]
fn a_key_that_is_no_threshold_is_named() {
    let folder = folder();
    fs::write(folder.path().join("detectors.toml"), "[thermal_throttle]\nwarning_shere = 0.2\n").expect("writes");
    let says = ["detectors.toml", "thermal_throttle.warning_shere", "warning_share"];
    let import = ["import", "smi.csv", "--lake", "lake", "--detectors", "detectors.toml"];
    refused("gpufleet", &import, folder.path(), 3, &says);
    refused("gpufleet", &["demo", "--lake", "lake", "--detectors", "detectors.toml"], folder.path(), 3, &says);
    let detect = ["detect", "--snapshots", "s", "--brokers", NOWHERE, "--detectors", "detectors.toml"];
    refused("gpufleet-processor", &detect, folder.path(), 3, &says);
    let import = ["import", "smi.csv", "--lake", "lake", "--detectors", "gone.toml"];
    refused("gpufleet", &import, folder.path(), 3, &["gone.toml"]);
    assert!(!folder.path().join("lake").exists(), "a refused command leaves no lake behind");
}

#[test]
fn an_incident_state_that_does_not_exist_is_refused() {
    let folder = folder_with_lake();
    let output = run("gpufleet", &["incidents", "--lake", "lake", "--state", "opne"], folder.path());
    assert_eq!(output.code, 2, "an empty answer would read as: all is well. {output}");
    assert!(output.stderr.contains("opne") && output.stderr.contains("resolved"), "{output}");
}

// --- Queries -----------------------------------------------------------------------------------------------------------

#[test]
fn a_column_that_does_not_exist_is_answered_with_the_nearest() {
    let folder = folder_with_lake();
    let says = ["temperature_gpu_celcius", "temperature_gpu_celsius"];
    sql_refused(folder.path(), "SELECT temperature_gpu_celcius FROM gpu_samples", 2, &says);
    sql_refused(folder.path(), "SELECT s.hst FROM gpu_samples s", 2, &["hst", "host"]);
}

#[test]
fn a_table_that_does_not_exist_is_answered_with_those_that_do() {
    let folder = folder_with_lake();
    sql_refused(folder.path(), "SELECT * FROM gpu_sample", 2, &["gpu_sample", "gpu_samples"]);
    sql_refused(folder.path(), "SELECT * FROM '/etc/passwd'", 2, &["/etc/passwd", "gpu_samples"]);
}

#[test]
fn text_that_is_no_query_is_refused_where_it_goes_wrong() {
    let folder = folder_with_lake();
    sql_refused(folder.path(), "SELEC 1", 2, &["SELEC", "olumn"]);
    sql_refused(folder.path(), "SELECT 1; SELECT 2", 2, &["single"]);
    sql_refused(folder.path(), "", 2, &[]);
    sql_refused(folder.path(), "SELECT nofunction(host) FROM gpu_samples", 2, &["nofunction"]);
}

#[test]
fn a_query_cannot_write_and_is_told_so() {
    let folder = folder_with_lake();
    for query in [
        "INSERT INTO gpu_samples SELECT * FROM gpu_samples",
        "CREATE TABLE t AS SELECT 1",
        "CREATE EXTERNAL TABLE t STORED AS CSV LOCATION '/etc/passwd'",
        "COPY (SELECT 1) TO 'out.csv' STORED AS CSV",
        "SET datafusion.execution.batch_size = 1",
        "DROP TABLE gpu_samples",
        "DELETE FROM gpu_samples",
        "UPDATE gpu_samples SET host = 'x'",
        "EXPLAIN ANALYZE INSERT INTO gpu_samples SELECT * FROM gpu_samples",
    ] {
        sql_refused(folder.path(), query, 2, &["read-only"]);
    }
    assert!(!folder.path().join("out.csv").exists(), "a query wrote a file");
    assert_eq!(samples(folder.path()), "2");
}

#[test]
fn questions_and_their_parameters_are_checked_by_name() {
    let folder = folder_with_lake();
    let ask = |more: &[&str], says: &[&str]| {
        let args = [&["sql", "--lake", "lake", "--question"], more].concat();
        refused("gpufleet", &args, folder.path(), 2, says);
    };
    ask(&["nope"], &["nope", "before_incident", "throttled_gpus"]);
    ask(&["before_incident"], &["incident", "--set"]);
    ask(&["before_incident", "--set", "incidnet=x"], &["incidnet", "incident", "minutes"]);
    let args = ["sql", "--lake", "lake", "--question", "before_incident", "--set", "incident"];
    refused_as_usage("gpufleet", &args, folder.path(), &["NAME=VALUE"]);
}

#[test]
fn values_that_do_not_fit_the_query_are_usage() {
    let folder = folder_with_lake();
    sql_refused(folder.path(), "SELECT $x", 2, &["x", "--set"]);
    let set = ["--set", "incident=x", "--set", "minutes=abc"];
    let args = [&["sql", "--lake", "lake", "--question", "before_incident"][..], &set].concat();
    refused("gpufleet", &args, folder.path(), 2, &["abc"]);
}

#[test]
fn a_folder_that_is_no_lake_is_not_asked_and_not_made_one() {
    let folder = folder();
    fs::create_dir(folder.path().join("photos")).expect("a folder");
    fs::write(folder.path().join("photos/a.jpg"), "x").expect("a file");
    for (lake, says) in [("photos", "not a lake"), ("nowhere", "no lake"), ("smi.csv", "no lake")] {
        refused("gpufleet", &["sql", "--lake", lake, "SELECT 1"], folder.path(), 3, &[lake, says, "--lake"]);
        refused("gpufleet", &["incidents", "--lake", lake], folder.path(), 3, &[lake, says, "--lake"]);
    }
    let import = ["import", "smi.csv", "--lake", "photos"];
    refused("gpufleet", &import, folder.path(), 3, &["photos", "not a lake", "a.jpg"]);
    assert!(!folder.path().join("nowhere").exists(), "a question made a folder");
    assert_eq!(fs::read_dir(folder.path().join("photos")).expect("a folder").count(), 1, "the folder was touched");
}

#[test]
fn a_reader_that_goes_away_is_success() {
    let folder = folder_with_lake();
    let kernel =
        "2026-03-02T09:00:01,250000+00:00 NVRM: Xid (PCI:0000:1b:00): 48, pid=3121, name=python3, DBE ECC Error\n";
    fs::write(folder.path().join("dmesg.txt"), kernel.repeat(5_000)).expect("a log can be written");
    // Each prints more than a pipe holds.
    for (program, rest) in [
        ("gpufleet", "sql --lake lake --limit 100000 'SELECT value FROM range(100000)'"),
        ("gpufleet", "sql --lake lake --limit 100000 --format csv 'SELECT value FROM range(100000)'"),
        ("gpufleet-collector", "decode dmesg.txt"),
    ] {
        let program = programs::program(program);
        let script = format!("set -o pipefail; '{}' {rest} | head -c 1", program.display());
        let output = run("bash", &["-c", &script], folder.path());
        assert_eq!((output.code, output.stdout.len()), (0, 1), "{rest}: {output}");
        assert!(output.stderr.is_empty(), "{rest}: {output}");
    }
}

// --- Imports -----------------------------------------------------------------------------------------------------------

#[test]
fn files_that_cannot_be_imported_are_named_with_what_to_do() {
    let folder = folder();
    let dir = folder.path();
    fs::create_dir(dir.join("logs")).expect("a folder");
    let bytes: Vec<u8> = (0..4096_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    fs::write(dir.join("core.bin"), bytes).expect("writes");
    fs::write(dir.join("headless.csv"), CSV.split_once('\n').expect("a header line").1).expect("writes");
    fs::write(dir.join("empty.csv"), "").expect("writes");
    fs::write(dir.join("copy.csv"), CSV).expect("writes");
    for (files, code, says) in [
        (&["logs"][..], 4, &["logs", "check that it is a file"][..]),
        (&["gone.csv"], 4, &["gone.csv", "check that it is a file"]),
        (&["core.bin"], 3, &["core.bin", "neither", "leave it out"]),
        (&["headless.csv"], 3, &["headless.csv", "no header line"]),
        (&["empty.csv"], 3, &["empty.csv", "leave it out"]),
        (&["smi.csv", "copy.csv", "--host", "node-07"], 3, &["smi.csv", "copy.csv", "same content"]),
    ] {
        refused("gpufleet", &[&["import", "--lake", "lake"], files].concat(), dir, code, says);
        let publish = [&["publish", "--brokers", NOWHERE, "--patience", "2s"], files].concat();
        refused("gpufleet-collector", &publish, dir, code, says);
    }
    assert!(!dir.join("lake").exists(), "a refused import leaves no lake behind");
    refused("gpufleet-collector", &["decode", "gone.txt"], dir, 4, &["gone.txt"]);
    refused("gpufleet-collector", &["decode", "logs"], dir, 4, &["logs"]);
    refused("gpufleet", &["import", "smi.csv", "--lake", "lake", "--tz", "CET"], dir, 2, &["--tz", "CET", "+01:00"]);
}

#[test]
fn an_import_that_goes_well_alarms_nobody() {
    let folder = folder();
    let output = run("gpufleet", &["import", "smi.csv", "--host", "node-07", "--lake", "lake"], folder.path());
    assert_eq!(output.code, 0, "{output}");
    assert!(output.stdout.contains("2 samples"), "{output}");
    let alarms: Vec<_> = output.stderr.lines().filter(|line| line.contains("ERROR") || line.contains("WARN")).collect();
    assert!(alarms.is_empty(), "nothing went wrong, and it says:\n{}", alarms.join("\n"));
}

#[test]
fn a_file_that_the_lake_has_adds_nothing_unless_it_is_asked_for_again() {
    let folder = folder_with_lake();
    let import = ["import", "smi.csv", "--host", "node-07", "--lake", "lake"];
    let second = run("gpufleet", &import, folder.path());
    assert_eq!(second.code, 0, "{second}");
    assert!(second.stdout.contains("the lake has it already") && second.stdout.contains("--again"), "{second}");
    assert_eq!(samples(folder.path()), "2");

    let json = run("gpufleet", &[&import[..], &["--format", "json"]].concat(), folder.path());
    let last = json.stdout.lines().last().unwrap_or_default();
    let report: Value = serde_json::from_str(last).unwrap_or_else(|error| panic!("{error}: {json}"));
    assert_eq!((&report["samples"], &report["skipped"][0]), (&Value::from(0), &Value::from("smi.csv")), "{report}");

    let again = run("gpufleet", &[&import[..], &["--again"]].concat(), folder.path());
    assert_eq!(again.code, 0, "{again}");
    assert!(again.stdout.contains("2 samples") && !again.stdout.contains("already"), "{again}");
    assert_eq!(samples(folder.path()), "4");
}

// --- What is not there -------------------------------------------------------------------------------------------------

#[test]
fn a_broker_that_does_not_answer_is_named() {
    let folder = folder();
    let says = [NOWHERE, "no Kafka broker answers", "check"];
    let rest = ["--brokers", NOWHERE, "--patience", "2s"];
    for (program, command) in [
        ("gpufleet", &["topics", "apply"][..]),
        ("gpufleet-collector", &["publish", "smi.csv"]),
        ("gpufleet-processor", &["detect", "--snapshots", "s"]),
        ("gpufleet-processor", &["archive", "--lake", "lake"]),
    ] {
        refused(program, &[command, &rest].concat(), folder.path(), 4, &says);
    }
    assert!(!folder.path().join("lake").exists(), "an archive that never began leaves no lake behind");
}

#[test]
fn a_host_without_a_driver_is_told_so() {
    if Path::new("/dev/nvidiactl").exists() {
        eprintln!("skipped: this host has an NVIDIA driver");
        return;
    }
    let folder = folder();
    refused("gpufleet-collector", &["run", "--brokers", NOWHERE], folder.path(), 4, &["NVML", "driver"]);
}
