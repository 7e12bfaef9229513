//! The files of `shared/cases/smi`, held against its `expected.tsv`.

use super::*;

fn folder() -> Option<PathBuf> {
    let shared = std::env::var_os("GPUFLEET_SHARED")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared"), PathBuf::from);
    let folder = shared.join("cases/smi");
    let there = folder.join("expected.tsv").is_file();
    if !there {
        println!("skipped: ../shared/cases is missing");
    }
    there.then_some(folder)
}

struct Case {
    summary: FileSummary,
    batches: Vec<GpuBatch>,
    events: Vec<XidEvent>,
}

impl Case {
    /// Instant (relative to nine), GPU index and value.
    fn values(&self, metric: Metric) -> Vec<(i64, Option<i32>, i64)> {
        let of = |batch: &GpuBatch| -> Vec<_> {
            let at = |tick| (batch.tick_at(tick) - NINE) / 1000;
            batch
                .gpus
                .iter()
                .flat_map(|gpu| gpu.readings(metric).map(move |(tick, value)| (at(tick), gpu.gpu_index, value)))
                .collect()
        };
        let mut values: Vec<_> = self.batches.iter().flat_map(of).collect();
        values.sort();
        values
    }

    fn lost(&self, reason: LostReason) -> Option<(i64, &str)> {
        let lost = self.summary.losses.iter().find(|lost| lost.reason == reason)?;
        Some((lost.count, lost.detail.as_deref().unwrap_or_default()))
    }
}

/// Reads a case and holds its rows and GPUs against the table.
fn case(file: &str) -> Option<Case> {
    let folder = folder()?;
    let expected = std::fs::read_to_string(folder.join("expected.tsv")).unwrap();
    let line = expected.lines().find(|line| line.starts_with(file)).unwrap();
    let want: Vec<u64> = line.split('\t').skip(1).take(2).map(|number| number.parse().unwrap()).collect();
    let mut recording = Recording::open(&[folder.join(file)], &RecordingOptions::default()).unwrap();
    let (mut batches, mut events) = (Vec::new(), Vec::new());
    for record in drain(&mut recording) {
        match record {
            Telemetry::Batch(batch) => batches.push(batch),
            Telemetry::Event(event) => events.push(event),
            Telemetry::Tick(_) | Telemetry::Topology(_) => panic!("no ticks"),
        }
    }
    let summary = recording.summary().remove(0);
    let samples: usize = batches.iter().map(GpuBatch::sample_count).sum();
    let gpus: BTreeSet<&str> = batches.iter().flat_map(|batch| &batch.gpus).map(|gpu| gpu.gpu_uuid.as_str()).collect();
    assert_eq!([samples as u64, gpus.len() as u64], want[..], "{file}");
    assert_eq!((summary.rows, summary.kind), (want[0], FileKind::NvidiaSmi));
    Some(Case { summary, batches, events })
}

#[test]
fn every_case_of_the_table_has_a_test_here() {
    let Some(folder) = folder() else { return };
    let expected = std::fs::read_to_string(folder.join("expected.tsv")).unwrap();
    let text = include_str!("shared_cases.rs");
    for file in expected.lines().skip(1).filter_map(|line| line.split('\t').next()) {
        assert!(text.contains(&format!("case(\"{file}\")")), "no test for {file}");
    }
}

#[test]
fn the_default_csv_gives_its_greatest_power_its_mask_and_its_uuids() {
    let Some(case) = case("01-default-csv.csv") else { return };
    assert_eq!(case.values(Metric::PowerDraw).iter().map(|(_, _, value)| *value).max(), Some(688_120));
    let thermal: Vec<_> =
        case.values(Metric::ClocksEventReasons).into_iter().filter(|(_, _, mask)| *mask == 0x20).collect();
    assert_eq!(thermal, [(1112, Some(0), 0x20)]);
    assert!(case.batches[0].gpus.iter().all(|gpu| gpu.gpu_uuid.starts_with("GPU-")));
    assert_eq!(case.batches[0].gpus[0].pci.as_deref(), Some("00000000:1b:00"));
    assert_eq!(case.values(Metric::MemoryUsed)[0].2, 70_123 << 20);
    assert!(case.summary.losses.is_empty());
}

#[test]
fn units_in_the_header_are_enough_and_identity_is_host_and_index() {
    let Some(case) = case("02-nounits.csv") else { return };
    assert_eq!(case.values(Metric::PowerDraw), [(112, Some(0), 402_310), (5113, Some(0), 398_700)]);
    assert_eq!(case.values(Metric::MemoryUsed)[0].2, 70_123 << 20);
    let gpu = &case.batches[0].gpus[0];
    assert_eq!((gpu.gpu_uuid.as_str(), gpu.model.as_deref()), ("02-nounits#0", Some("NVIDIA A100-SXM4-80GB")));
    assert!(case.summary.losses.is_empty());
}

#[test]
fn what_is_not_available_is_absent_and_a_lost_gpu_is_an_event() {
    let Some(case) = case("03-not-available.csv") else { return };
    for metric in Metric::ALL {
        let values: Vec<_> = case.values(*metric).into_iter().map(|(at, _, value)| (at, value)).collect();
        match metric {
            Metric::TemperatureGpu => assert_eq!(values, [(0, 41)]),
            Metric::EccSbeVolatile => assert_eq!(values, [(0, 0)]),
            _ => assert_eq!(values, [], "{metric:?}"),
        }
    }
    let [event] = case.events.as_slice() else { panic!("{:?}", case.events) };
    assert_eq!((event.kind, event.origin.observed_at), (EventKind::GpuLost, NINE + 2_000_000));
    assert_eq!(event.gpu_uuid.as_deref(), Some("GPU-11111111-0000-4000-8000-000000000001"));
    assert_eq!(
        (event.message.as_str(), event.raw.starts_with("2026/03/02 09:00:02.000, GPU-1111")),
        ("GPU is lost", true)
    );
    let last = case.batches.last().unwrap();
    assert_eq!(last.tick_at(last.ticks.len() - 1), NINE + 2_000_000);
    assert!(case.summary.losses.is_empty());
}

#[test]
fn reasons_as_words_give_the_masks() {
    let Some(case) = case("04-reasons-as-words.csv") else { return };
    let masks: Vec<i64> = case.values(Metric::ClocksEventReasons).iter().map(|(_, _, mask)| *mask).collect();
    assert_eq!(masks, [0x4, 0x8 | 0x40]);
    assert_eq!(
        case.values(Metric::ClockSm).iter().map(|(_, index, value)| (*index, *value)).collect::<Vec<_>>(),
        [(Some(3), 1410), (Some(3), 705)]
    );
    assert!(case.summary.losses.is_empty());
}

#[test]
fn utf16_with_a_mark_and_crlf_reads_as_any_other() {
    let Some(case) = case("05-utf16-crlf.csv") else { return };
    assert_eq!(case.values(Metric::PowerDraw), [(112, Some(0), 90_110), (1112, Some(0), 91_020)]);
    assert_eq!(case.values(Metric::TemperatureGpu), [(112, Some(0), 45), (1112, Some(0), 46)]);
    assert!(case.summary.losses.is_empty());
}

#[test]
fn a_restarted_log_loses_only_its_cut_line() {
    let Some(case) = case("06-restarted-twice.csv") else { return };
    assert_eq!(
        case.values(Metric::TemperatureGpu).iter().map(|(_, _, value)| *value).collect::<Vec<_>>(),
        [45, 46, 50]
    );
    let (count, detail) = case.lost(LostReason::CutLine).unwrap();
    assert_eq!((count, case.summary.losses.len()), (1, 1));
    assert!(detail.contains("06-restarted-twice.csv:6 "), "{detail}");
}
