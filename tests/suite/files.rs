//! People's files, by `import` and by `publish` to Kafka: the rows and values that the case table says.

use std::path::Path;

use gpufleet_tests::kafka;
use gpufleet_tests::lake::{ask, number};
use gpufleet_tests::log::Log;
use gpufleet_tests::programs::{run, shared};
use serde_json::{Value, json};

/// Rows and GPUs of every file, as `expected.tsv` has them.
fn expected(cases: &Path) -> Vec<(String, i64, i64)> {
    let table = std::fs::read_to_string(cases.join("expected.tsv")).expect("the table");
    let row = |line: &str| {
        let cells: Vec<&str> = line.split('\t').collect();
        (cells[0].to_owned(), cells[1].parse().expect("rows"), cells[2].parse().expect("GPUs"))
    };
    table.lines().skip(1).filter(|line| !line.is_empty()).map(row).collect()
}

/// What the table's notes say of a file, asked of the lake that it became.
fn check(file: &str, rows: i64, gpus: i64, lake: &Path) {
    assert_eq!(number(lake, "SELECT count(*) FROM gpu_samples"), rows, "{file}");
    assert_eq!(number(lake, "SELECT count(DISTINCT gpu_uuid) FROM gpu_samples"), gpus, "{file}");
    let one = |sql: &str| ask(lake, sql);
    match file {
        "01-default-csv.csv" => {
            let power = one("SELECT max(power_draw_milliwatts) AS w FROM gpu_samples");
            assert_eq!(power, [json!({"w": 688_120})]);
            let hot = one(
                "SELECT gpu_index, date_part('second', observed_at) AS s FROM gpu_samples WHERE clocks_event_reasons = 32",
            );
            assert_eq!(
                (&hot[0]["gpu_index"], hot[0]["s"].as_f64().map(f64::floor), hot.len()),
                (&json!(0), Some(1.0), 1)
            );
            assert_eq!(number(lake, "SELECT count(*) FROM gpu_samples WHERE gpu_uuid LIKE 'GPU-0a1b2c3d-%'"), rows);
        }
        "02-nounits.csv" => {
            let rows = one(
                "SELECT gpu_uuid, host, power_draw_milliwatts AS w, memory_used_bytes AS b FROM gpu_samples ORDER BY observed_at",
            );
            let host = rows[0]["host"].as_str().expect("a host");
            assert_eq!(rows[0]["gpu_uuid"], format!("{host}#0"));
            assert_eq!(
                (&rows[0]["w"], &rows[1]["w"], &rows[0]["b"]),
                (&json!(402_310), &json!(398_700), &json!(70_123_i64 << 20))
            );
        }
        "03-not-available.csv" => check_not_available(lake),
        "04-reasons-as-words.csv" => {
            let masks = one("SELECT clocks_event_reasons AS m FROM gpu_samples ORDER BY observed_at");
            assert_eq!(masks, [json!({"m": 0x4}), json!({"m": 0x48})]);
        }
        "05-utf16-crlf.csv" => {
            let rows = one(
                "SELECT temperature_gpu_celsius AS t, power_draw_milliwatts AS w FROM gpu_samples ORDER BY observed_at",
            );
            assert_eq!(rows, [json!({"t": 45, "w": 90_110}), json!({"t": 46, "w": 91_020})]);
        }
        "06-restarted-twice.csv" => {
            let losses = one("SELECT reason, count, detail FROM losses");
            assert_eq!((losses.len(), &losses[0]["reason"], &losses[0]["count"]), (1, &json!("cut_line"), &json!(1)));
            assert!(losses[0]["detail"].as_str().is_some_and(|detail| detail.contains("06-restarted-twice.csv:6")));
        }
        other => panic!("the table has a file that no check is for: {other}"),
    }
    let left_out = number(lake, "SELECT count(*) FROM losses");
    assert_eq!(left_out, i64::from(file == "06-restarted-twice.csv"), "{file}");
}

/// The third row is a lost GPU: every value absent, the row kept, an event reported.
fn check_not_available(lake: &Path) {
    let rows = ask(lake, "SELECT * FROM gpu_samples ORDER BY observed_at");
    for (i, row) in rows.iter().enumerate() {
        for (column, value) in row.as_object().expect("an object") {
            let want = match (column.as_str(), i) {
                ("temperature_gpu_celsius", 0) => json!(41),
                ("ecc_sbe_volatile", 0) => json!(0),
                (name, _) if gpufleet_schemas::metric::Metric::by_name(name).is_some() => Value::Null,
                _ => continue,
            };
            assert_eq!(*value, want, "row {i} {column}");
        }
    }
    let events = ask(lake, "SELECT kind, gpu_uuid FROM xid_events");
    assert_eq!(events, [json!({"kind": "gpu_lost", "gpu_uuid": "GPU-11111111-0000-4000-8000-000000000001"})]);
}

#[test]
fn every_smi_case_becomes_its_rows_by_import() {
    let Some(shared) = shared() else { return };
    let cases = shared.join("cases/smi");
    for (file, rows, gpus) in expected(&cases) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = cases.join(&file);
        let done = run("gpufleet", &["import", path.to_str().expect("a path"), "--lake", "lake"], folder.path());
        assert_eq!(done.code, 0, "{}", done.stderr);
        check(&file, rows, gpus, &folder.path().join("lake"));
    }
}

#[test]
fn every_smi_case_becomes_its_rows_by_publish_to_kafka() {
    let Some(shared) = shared() else { return };
    let cases = shared.join("cases/smi");
    for (file, rows, gpus) in expected(&cases) {
        let log = Log::create(kafka::shared().bootstrap());
        let folder = tempfile::tempdir().expect("a folder");
        let path = cases.join(&file);
        let publish = [
            "publish",
            path.to_str().expect("a path"),
            "--brokers",
            &log.brokers,
            "--topic-prefix",
            &log.prefix,
            "--partitions",
            "4",
        ];
        let done = run("gpufleet-collector", &publish, folder.path());
        assert_eq!(done.code, 0, "{}", done.stderr);
        let mut archive = vec!["archive".to_owned()];
        archive.extend(log.arguments());
        archive.extend(["--lake", "lake"].map(str::to_owned));
        let archive: Vec<&str> = archive.iter().map(String::as_str).collect();
        let done = run("gpufleet-processor", &archive, folder.path());
        assert_eq!(done.code, 0, "{}", done.stderr);
        check(&file, rows, gpus, &folder.path().join("lake"));
    }
}

#[test]
fn decode_is_right_on_every_line_of_the_case_file() {
    let Some(shared) = shared() else { return };
    let table = std::fs::read_to_string(shared.join("cases/xid-lines.tsv")).expect("the case file");
    let folder = tempfile::tempdir().expect("a folder");
    let (mut events, mut others) = (0, 0);
    for line in table.lines().skip(1) {
        let cells: Vec<&str> = line.split('\t').collect();
        let cell = |i: usize| cells.get(i).copied().unwrap_or_default();
        std::fs::write(folder.path().join("line"), cell(1).replace("\\n", "\n")).expect("writes");
        let done = run("gpufleet-collector", &["decode", "line", "--format", "json"], folder.path());
        assert_eq!(done.code, 0, "{}: {}", cell(0), done.stderr);
        let objects: Vec<Value> = done.stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        if !matches!(cell(2), "xid" | "sxid" | "fell_off") {
            assert_eq!(objects, Vec::<Value>::new(), "{} opens no event", cell(0));
            others += 1;
            continue;
        }
        let [object] = objects.as_slice() else { panic!("{}: {objects:?}", cell(0)) };
        let number = |text: &str| text.parse::<i64>().map_or(Value::Null, Value::from);
        let text = |text: &str| if text.is_empty() { Value::Null } else { Value::from(text) };
        // The table prints the PCI function that its own description leaves out.
        let pci = cell(4).rsplit_once('.').map_or(cell(4), |(pci, _)| pci);
        assert_eq!(object["kind"], cell(2), "{}", cell(0));
        assert_eq!(object["code"], number(cell(3)), "{}", cell(0));
        assert_eq!(object["pci"], text(pci), "{}", cell(0));
        assert_eq!(object["pid"], number(cell(5)), "{}", cell(0));
        assert_eq!(object["process"], text(cell(6)), "{}", cell(0));
        assert!(object["action"].as_array().is_some_and(|ladder| !ladder.is_empty()), "{}", cell(0));
        events += 1;
    }
    assert!(events >= 80 && others >= 30, "{events} events and {others} others");
}
