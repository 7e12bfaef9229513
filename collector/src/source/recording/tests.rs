use std::collections::BTreeSet;

use gpufleet_schemas::metric::Metric;
use gpufleet_schemas::record::{EventKind, LostReason};

use super::*;

mod shared_cases;

/// 2026-03-02 09:00:00 UTC.
const NINE: i64 = 1_772_442_000_000_000;
const CSV: &str = "timestamp, index, temperature.gpu\n2026/03/02 09:00:00.000, 0, 40\n2026/03/02 09:00:04.000, 0, 41\n";
const KERNEL: &str = "2026-03-02T09:00:02.000000+00:00 node9 kernel: NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, name=train, GPU has fallen off the bus.\n";

fn files(contents: &[(&str, &[u8])]) -> (tempfile::TempDir, Vec<PathBuf>) {
    let folder = tempfile::tempdir().unwrap();
    let paths = contents.iter().map(|(name, bytes)| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    });
    let paths = paths.collect();
    (folder, paths)
}

fn drain(recording: &mut Recording) -> Vec<Telemetry> {
    std::iter::from_fn(|| recording.next().unwrap()).collect()
}

fn origin(record: &Telemetry) -> &Origin {
    match record {
        Telemetry::Batch(batch) => &batch.origin,
        Telemetry::Event(event) => &event.origin,
        Telemetry::Tick(_) | Telemetry::Topology(_) => panic!("a recording writes no ticks"),
    }
}

#[test]
fn files_of_both_kinds_are_told_apart_and_merged_by_time() {
    let (_folder, paths) = files(&[("node7.csv", CSV.as_bytes()), ("messages", KERNEL.as_bytes())]);
    let labels = Labels { rack: Some("r2".to_owned()), ..Labels::default() };
    let mut recording = Recording::open(&paths, &RecordingOptions { labels, ..RecordingOptions::default() }).unwrap();
    let records = drain(&mut recording);
    let order: Vec<(&str, i64, i64)> =
        records.iter().map(origin).map(|o| (o.host.as_str(), (o.observed_at - NINE) / 1_000_000, o.seq)).collect();
    assert_eq!(order, [("node7", 0, 0), ("node9", 2, 0), ("node7", 4, 1)]);
    let Telemetry::Event(event) = &records[1] else { panic!("{:?}", records[1]) };
    assert_eq!((event.kind, event.code, event.pci.as_deref()), (EventKind::Xid, Some(79), Some("00000000:1b:00")));
    assert_eq!((event.pid, event.process.as_deref(), event.time_estimated), (Some(1234), Some("train"), false));
    assert_eq!((event.raw.as_str(), event.labels.rack.as_deref()), (KERNEL.trim_end(), Some("r2")));
    let summary: Vec<_> =
        recording.summary().into_iter().map(|file| (file.kind, file.host, file.rows, file.events)).collect();
    assert_eq!(
        summary,
        [(FileKind::NvidiaSmi, "node7".to_owned(), 2, 0), (FileKind::KernelLog, "node9".to_owned(), 0, 1)]
    );
    assert!(records.iter().all(|record| origin(record).collector_version == env!("CARGO_PKG_VERSION")));
}

#[test]
fn identity_is_the_content_and_a_salt_makes_it_new() {
    let (_folder, paths) =
        files(&[("a.csv", CSV.as_bytes()), ("b.csv", CSV.as_bytes()), ("c.csv", &CSV.as_bytes()[..CSV.len() - 1])]);
    let boots = |salt: Option<&str>| {
        let options = RecordingOptions { salt: salt.map(str::to_owned), ..RecordingOptions::default() };
        let mut recording = Recording::open(&paths, &options).unwrap();
        let known: Vec<String> = recording.files().iter().map(|file| file.boot_id.clone()).collect();
        let seen: BTreeSet<String> =
            drain(&mut recording).iter().map(|record| origin(record).boot_id.clone()).collect();
        assert_eq!(seen, known.iter().cloned().collect());
        known
    };
    let plain = boots(None);
    assert_eq!(plain[0], plain[1]);
    assert_ne!(plain[0], plain[2]);
    assert!(plain[0].strip_prefix("file:").is_some_and(|hash| hash.len() == 16));
    assert_eq!(boots(Some("x1"))[0], format!("{}+x1", plain[0]));
    // sha256 of a known text, so that the identity stays what it was.
    assert_eq!(Hashing::new(&b"abc"[..]).into_hash(), "ba7816bf8f01cfea");
}

impl Hashing<&[u8]> {
    fn into_hash(mut self) -> String {
        self.finish().unwrap();
        self.hash()
    }
}

#[test]
fn the_same_content_twice_for_one_host_is_refused_with_both_names() {
    let (_folder, paths) = files(&[("a.csv", CSV.as_bytes()), ("b.csv", CSV.as_bytes())]);
    let options = RecordingOptions { host: Some("node7".to_owned()), ..RecordingOptions::default() };
    let error = Recording::open(&paths, &options).err().unwrap();
    let text = error.to_string();
    assert!(text.contains("a.csv") && text.contains("b.csv") && text.contains("node7"), "{text}");
    assert_eq!(error.fault(), gpufleet_runtime::exit::Fault::Config);
}

#[test]
fn losses_travel_with_the_next_record_and_the_rest_in_a_last_empty_batch() {
    let text = "timestamp, index, temperature.gpu, fabric.state\n2026/03/02 09:00:00.000, 0, hot, x\n\
                2026/03/02 09:00:10.000, 0, 41, x\nrubbish\nmore rubbish\n2026/03/02 09:00:20.000, 0, 42, x\n2026/03/02 09:00:2\n";
    let (_folder, paths) = files(&[("log.csv", text.as_bytes())]);
    let mut recording = Recording::open(&paths, &RecordingOptions::default()).unwrap();
    let records = drain(&mut recording);
    let lost: Vec<Vec<(LostReason, i64)>> = records
        .iter()
        .map(|record| origin(record).lost.iter().map(|lost| (lost.reason, lost.count)).collect())
        .collect();
    assert_eq!(lost[0], [(LostReason::UnknownColumn, 1), (LostReason::UnreadableCell, 1)]);
    assert_eq!(lost[1], [(LostReason::UnreadableLine, 2)]);
    assert_eq!(lost[2..], [vec![(LostReason::CutLine, 1)]], "the cut line is known before the last batch leaves");
    let details: Vec<String> = recording.summary()[0].losses.iter().filter_map(|lost| lost.detail.clone()).collect();
    assert!(details[1].ends_with("log.csv:2 temperature.gpu \"hot\""), "{details:?}");

    let nothing = format!("{}rubbish\n", &CSV[..CSV.find("2026").unwrap()]);
    let (_folder, paths) = files(&[("log.csv", nothing.as_bytes())]);
    let mut recording = Recording::open(&paths, &RecordingOptions::default()).unwrap();
    let records = drain(&mut recording);
    let [Telemetry::Batch(batch)] = records.as_slice() else { panic!("{records:?}") };
    assert!(batch.ticks.is_empty() && batch.gpus.is_empty());
    assert_eq!((batch.origin.lost.len(), batch.origin.host.as_str(), batch.origin.seq), (1, "log", 0));
    assert!(batch.origin.observed_at > NINE, "the time of the file's last change");
    assert_eq!((recording.summary()[0].rows, recording.summary()[0].losses.len()), (0, 1));
}

#[test]
fn quoted_reports_of_a_kernel_log_are_counted() {
    let text = format!(
        "{KERNEL}2026-03-02T09:00:03+00:00 node9 monitor[7]: saw NVRM: Xid (PCI:0000:1b:00): 79, pid=1, name=x, GPU has fallen off the bus.\n"
    );
    let (_folder, paths) = files(&[("messages", text.as_bytes())]);
    let mut recording = Recording::open(&paths, &RecordingOptions::default()).unwrap();
    let records = drain(&mut recording);
    assert_eq!(records.len(), 1);
    assert_eq!(
        origin(&records[0]).lost.iter().map(|lost| (lost.reason, lost.count)).collect::<Vec<_>>(),
        [(LostReason::UnreadableLine, 1)]
    );
}

#[test]
fn a_kernel_log_without_years_ends_where_its_file_was_written() {
    let line = |stamp: &str| {
        format!("{stamp} node9 kernel: NVRM: Xid (PCI:0000:1b:00): 79, pid=1, name=x, GPU has fallen off the bus.\n")
    };
    let (_folder, paths) = files(&[("messages", (line("Dec 31 23:00:00") + &line("Jan  1 01:00:00")).as_bytes())]);
    let january = UNIX_EPOCH + std::time::Duration::from_secs(1_767_225_600 + 86_400);
    File::options().append(true).open(&paths[0]).unwrap().set_modified(january).unwrap();
    let years = |year| {
        let mut recording = Recording::open(&paths, &RecordingOptions { year, ..RecordingOptions::default() }).unwrap();
        drain(&mut recording)
            .iter()
            .map(|record| instant::text(origin(record).observed_at)[..10].to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(years(None), ["2025-12-31", "2026-01-01"]);
    assert_eq!(years(Some(2020)), ["2020-12-31", "2021-01-01"]);
}

#[test]
fn a_file_that_cannot_be_used_is_an_error_that_names_it_and_says_what_to_try() {
    let rows = b"2026/03/02 09:00:00.112, 0, 45, 688.12 W\n";
    let (folder, paths) =
        files(&[("rows.csv", rows), ("letter.txt", b"Dear all,\nthe GPUs are fine.\n"), ("empty", b"")]);
    let open =
        |path: &PathBuf| Recording::open(std::slice::from_ref(path), &RecordingOptions::default()).err().unwrap();
    assert!(matches!(open(&paths[0]), SourceError::NoHeader { .. }));
    for path in &paths[1..] {
        let error = open(path);
        assert!(matches!(error, SourceError::UnknownContent { .. }), "{error}");
        assert!(error.to_string().contains("nvidia-smi CSV log") && error.to_string().contains("kernel log"));
    }
    for path in [folder.path().join("missing.csv"), folder.path().to_owned()] {
        let error = open(&path);
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
        assert_eq!(error.fault(), gpufleet_runtime::exit::Fault::External);
    }
}

#[test]
fn a_host_in_the_file_wins_over_the_option_and_the_option_over_the_name() {
    let named = "timestamp, hostname, index, temperature.gpu\n2026/03/02 09:00:00.000, inside, 0, 40\n";
    let host = |text: &str, host: Option<&str>| {
        let (_folder, paths) = files(&[("node7.gpu.csv", text.as_bytes())]);
        let options = RecordingOptions { host: host.map(str::to_owned), ..RecordingOptions::default() };
        let mut recording = Recording::open(&paths, &options).unwrap();
        let host = origin(&drain(&mut recording)[0]).host.clone();
        assert_eq!(recording.summary()[0].host, host);
        host
    };
    assert_eq!(host(named, Some("option")), "inside");
    assert_eq!(host(CSV, Some("option")), "option");
    assert_eq!(host(CSV, None), "node7.gpu");
}
