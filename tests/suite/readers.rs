//! Readers that share no code with us: fastavro reads our bytes, and DuckDB counts our rows.

use std::io::Write;
use std::process::{Command, Stdio};

use gpufleet_schemas::metric::Metric;
use gpufleet_schemas::record::{GpuBatch, GpuBlock, Labels, Origin, Series, Telemetry};
use gpufleet_schemas::wire::Encoder;
use gpufleet_tests::lake::number;
use gpufleet_tests::programs::{python, run, workspace};

#[test]
fn fastavro_reads_our_batches() {
    let mut block =
        GpuBlock { gpu_uuid: "GPU-1".into(), tier_ticks: [vec![0, 1, 2], vec![0], vec![]], ..GpuBlock::default() };
    block.series[Metric::PowerDraw.index()] = Series::dense(vec![688_120, 690_000, 300_000]);
    block.series[Metric::ClockSm.index()] = Series::sparse(&[Some(1980), None, Some(1230)]);
    block.series[Metric::Energy.index()] = Series::dense(vec![1_234_567_890_123]);
    let batch = GpuBatch {
        origin: Origin { host: "node-1".into(), observed_at: 1_772_442_000_112_345, seq: 7, ..Origin::default() },
        labels: Labels { feeds: vec!["A".into()], ..Labels::default() },
        ticks: vec![0, 100_000, 200_000],
        gpus: vec![block],
    };
    let mut input = Vec::new();
    let mut bytes = Vec::new();
    Encoder::default().telemetry(&Telemetry::Batch(batch), &mut bytes);
    let mut records = vec![bytes];
    let golden = std::fs::read_dir(workspace().join("schemas/golden")).expect("golden bytes");
    records.extend(golden.map(|entry| std::fs::read(entry.expect("an entry").path()).expect("bytes")));
    for record in &records {
        input.extend(u32::try_from(record.len()).expect("small").to_be_bytes());
        input.extend(record);
    }
    let mut child = Command::new(python())
        .arg(workspace().join("tests/python/read_batches.py"))
        .arg(workspace().join("schemas/avro"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("python runs");
    child.stdin.take().expect("stdin").write_all(&input).expect("writes");
    let output = child.wait_with_output().expect("ends");
    assert!(output.status.success());
    let lines: Vec<serde_json::Value> =
        String::from_utf8_lossy(&output.stdout).lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(lines.len(), records.len());
    assert_eq!(lines[0]["schema"], "io.gpufleet.GpuBatch");
    let value = &lines[0]["value"];
    assert_eq!(value["origin"]["observed_at"], 1_772_442_000_112_345_i64);
    let gpu = &value["gpus"][0];
    assert_eq!(
        gpu["power_draw_milliwatts"],
        serde_json::json!([688_120, 1_880, -390_000]),
        "differences from tick to tick"
    );
    assert_eq!(gpu["clock_sm_megahertz"], serde_json::json!({"present": "05", "values": [1980, -750]}));
    assert_eq!(gpu["energy_millijoules"], serde_json::json!([1_234_567_890_123_i64]));
    assert!(gpu["temperature_gpu_celsius"].is_null(), "not read is absent, never 0");
}

#[test]
fn duckdb_counts_the_rows_that_we_count() {
    let folder = tempfile::tempdir().expect("a folder");
    let done = run(
        "gpufleet",
        &["demo", "--for", "3s", "--gpus", "8", "--seed", "9", "--lake", "lake", "--format", "json"],
        folder.path(),
    );
    assert_eq!(done.code, 0, "{}", done.stderr);
    let lake = folder.path().join("lake");
    for table in ["gpu_samples", "xid_events", "incidents", "losses"] {
        let output = Command::new(python())
            .arg(workspace().join("tests/python/count_rows.py"))
            .arg(lake.join(table))
            .output()
            .expect("python runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let counted: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(counted["rows"], number(&lake, &format!("SELECT count(*) FROM {table}")), "{table}");
    }
    assert!(number(&lake, "SELECT count(*) FROM gpu_samples") > 200_000);
}
