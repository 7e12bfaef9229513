use std::collections::BTreeMap;

use gpufleet_schemas::metric::Tier;
use gpufleet_schemas::record::GpuBatch;

use super::*;

mod cells;

/// 2026-03-02 09:00:00 UTC.
const NINE: i64 = 1_772_442_000_000_000;

struct Read {
    batches: Vec<GpuBatch>,
    events: Vec<XidEvent>,
    losses: BTreeMap<LostReason, (i64, String)>,
    counts: Counts,
}

impl Read {
    fn lost(&self, reason: LostReason) -> i64 {
        self.losses.get(&reason).map_or(0, |(count, _)| *count)
    }

    fn detail(&self, reason: LostReason) -> &str {
        self.losses.get(&reason).map_or("", |(_, detail)| detail)
    }

    /// Instant (relative to nine), GPU and value of a metric, in order.
    fn values(&self, metric: Metric) -> Vec<(i64, String, i64)> {
        let mut values = Vec::new();
        for batch in &self.batches {
            for gpu in &batch.gpus {
                let at = |tick| batch.tick_at(tick) - NINE;
                values.extend(gpu.readings(metric).map(|(tick, value)| (at(tick), gpu.gpu_uuid.clone(), value)));
            }
        }
        values.sort();
        values
    }

    fn only(&self, metric: Metric) -> Option<i64> {
        let values = self.values(metric);
        assert!(values.len() <= 1, "{values:?}");
        values.first().map(|(_, _, value)| *value)
    }
}

fn options() -> Options {
    Options { name: "log.csv".to_owned(), host: "node7".to_owned(), ..Options::default() }
}

fn read_with(bytes: &[u8], options: Options) -> Result<Read, SourceError> {
    let mut reader = Reader::new(bytes, options)?;
    let (mut batches, mut events) = (Vec::new(), Vec::new());
    for record in &mut reader {
        match record? {
            Telemetry::Batch(batch) => batches.push(batch),
            Telemetry::Event(event) => events.push(event),
            Telemetry::Tick(_) | Telemetry::Topology(_) => panic!("no ticks here"),
        }
    }
    let losses = reader.take_losses();
    let losses = losses.into_iter().map(|lost| (lost.reason, (lost.count, lost.detail.unwrap()))).collect();
    Ok(Read { batches, events, losses, counts: reader.counts() })
}

fn read(text: &str) -> Read {
    read_with(text.as_bytes(), options()).unwrap()
}

/// One row of one column, beside the time.
fn cell(column: &str, cell: &str) -> Read {
    read(&format!("timestamp, {column}\n2026/03/02 09:00:00.000, {cell}\n"))
}

#[test]
fn columns_in_any_order_give_the_same_batch() {
    let one = read(
        "timestamp, index, uuid, power.draw [W], temperature.gpu\n2026/03/02 09:00:00.250, 4, GPU-a, 300.25 W, 50\n",
    );
    let other =
        read("temperature.gpu,power.draw [W],uuid,timestamp,index\n50,300.25 W,GPU-a,2026/03/02 09:00:00.250,4\n");
    assert_eq!(one.batches, other.batches);
    let batch = &one.batches[0];
    assert_eq!((batch.origin.observed_at, batch.origin.host.as_str()), (NINE + 250_000, "node7"));
    assert_eq!((batch.ticks.as_slice(), batch.gpus[0].gpu_index), ([0].as_slice(), Some(4)));
    assert_eq!(one.values(Metric::PowerDraw), [(250_000, "GPU-a".to_owned(), 300_250)]);
    assert!(one.losses.is_empty());
}

#[test]
fn rows_within_a_second_are_one_batch_with_a_tick_per_instant() {
    let mut text = "timestamp, index, clocks.sm [MHz], temperature.gpu\n".to_owned();
    for (time, index, clock, celsius) in [
        ("00.000", 0, "1000 MHz", "50"),
        ("00.003", 1, "1001 MHz", "60"),
        ("00.500", 0, "[N/A]", "51"),
        ("01.000", 1, "1003 MHz", "[N/A]"),
    ] {
        text += &format!("2026/03/02 09:00:{time}, {index}, {clock}, {celsius}\n");
    }
    text += "2026/03/02 09:00:01.001, 0, 1004 MHz, 52\n";
    let read = read(&text);
    assert_eq!(read.batches.len(), 2);
    let batch = &read.batches[0];
    assert_eq!(batch.ticks, [0, 3000, 500_000, 1_000_000]);
    assert_eq!(batch.sample_count(), 4);
    assert_eq!((batch.gpus[0].ticks(Tier::Fast), batch.gpus[0].ticks(Tier::Slow)), ([0].as_slice(), [0, 2].as_slice()));
    assert_eq!((batch.gpus[1].ticks(Tier::Fast), batch.gpus[1].ticks(Tier::Slow)), ([1, 3].as_slice(), [1].as_slice()));
    let clocks: Vec<i64> = read.values(Metric::ClockSm).iter().map(|(_, _, value)| *value).collect();
    assert_eq!(clocks, [1000, 1001, 1003, 1004]);
    assert_eq!(read.counts.rows, 5);
}

#[test]
fn a_batch_is_bounded_in_ticks_and_no_row_is_lost_between_batches() {
    let mut text = "timestamp, index, temperature.gpu\n".to_owned();
    for i in 0..200 {
        text += &format!("2026/03/02 09:00:00.{i:03}, 0, {i}\n");
    }
    let read = read(&text);
    assert_eq!(read.batches.iter().map(|batch| batch.ticks.len()).collect::<Vec<_>>(), [64, 64, 64, 8]);
    let values: Vec<i64> = read.values(Metric::TemperatureGpu).iter().map(|(_, _, value)| *value).collect();
    assert_eq!(values, (0..200).collect::<Vec<_>>());
}

#[test]
fn rows_slightly_out_of_order_share_a_batch_and_a_jump_back_begins_a_new_one() {
    let read = read(
        "timestamp, index, temperature.gpu\n2026/03/02 09:00:00.200, 0, 1\n2026/03/02 09:00:00.100, 1, 2\n\
         2026/03/02 09:00:00.150, 0, 3\n2026/03/02 08:00:00.000, 0, 4\n",
    );
    assert_eq!(read.batches.len(), 2);
    assert_eq!(
        (read.batches[0].origin.observed_at, &read.batches[0].ticks),
        (NINE + 100_000, &vec![0, 50_000, 100_000])
    );
    let all: Vec<(i64, i64)> =
        read.values(Metric::TemperatureGpu).into_iter().map(|(at, _, value)| (at, value)).collect();
    assert_eq!(all, [(-3_600_000_000, 4), (100_000, 2), (150_000, 3), (200_000, 1)]);
}

#[test]
fn two_rows_of_a_gpu_at_one_instant_are_two_samples() {
    let read = read("timestamp, index, pstate\n2026/03/02 09:00:00.000, 0, P0\n2026/03/02 09:00:00.000, 0, P2\n");
    assert_eq!(read.batches.iter().map(GpuBatch::sample_count).collect::<Vec<_>>(), [1, 1]);
}

#[test]
fn identity_is_the_uuid_then_host_and_index_then_the_bus_then_the_host_alone() {
    let row = |columns: &str, cells: &str| {
        let read = read(&format!("timestamp, {columns}, temperature.gpu\n2026/03/02 09:00:00, {cells}, 40\n"));
        assert_eq!(read.counts.rows, 1, "{columns}");
        let gpu = read.batches[0].gpus[0].clone();
        (gpu.gpu_uuid, gpu.pci)
    };
    let bus = Some("00000000:1b:00".to_owned());
    assert_eq!(row("index, gpu_uuid, gpu_bus_id", "3, GPU-x, 00000000:1B:00.0"), ("GPU-x".to_owned(), bus.clone()));
    assert_eq!(row("index, uuid, pci.bus_id", "3, [N/A], 0000:1B:00.0"), ("node7#3".to_owned(), bus.clone()));
    assert_eq!(row("pci.bus_id", "00000000:1B:00.0"), ("00000000:1b:00".to_owned(), bus));
    assert_eq!(row("pci.bus", "0x1B").0, "00000000:1b:00");
    assert_eq!(row("pci.bus, pci.domain, pci.device", "0x1B, 0x0009, 0x01").0, "00000009:1b:01");
    assert_eq!(row("memory.used [MiB]", "5").0, "node7#0");
    assert_eq!(row("hostname, index", "other, 2").0, "other#2");
    let read = read("timestamp, index, temperature.gpu\n2026/03/02 09:00:00, [N/A], 40\n");
    assert_eq!((read.counts.rows, read.lost(LostReason::UnreadableLine)), (0, 1));
}

#[test]
fn a_lost_gpu_is_one_event_until_it_reads_again_and_its_rows_keep_their_time() {
    let lost = "[GPU is lost], [GPU is lost]";
    let text = format!(
        "timestamp, index, uuid, temperature.gpu\n2026/03/02 09:00:00.000, 5, GPU-e, 44\n2026/03/02 09:00:10.000, 5, {lost}\n\
         2026/03/02 09:00:20.000, 5, {lost}\n2026/03/02 09:00:30.000, 5, GPU-e, 45\n2026/03/02 09:00:40.000, 5, {lost}\n"
    );
    let read = read(&text);
    let at: Vec<i64> = read.events.iter().map(|event| event.origin.observed_at - NINE).collect();
    assert_eq!(at, [10_000_000, 40_000_000]);
    let event = &read.events[0];
    assert_eq!((event.kind, event.gpu_uuid.as_deref()), (EventKind::GpuLost, Some("GPU-e")));
    assert_eq!(
        (event.message.as_str(), event.raw.as_str()),
        ("GPU is lost", format!("2026/03/02 09:00:10.000, 5, {lost}").as_str())
    );
    assert_eq!((read.counts.rows, read.batches.iter().map(GpuBatch::sample_count).sum::<usize>()), (5, 5));
    assert!(read.batches.iter().all(|batch| batch.gpus[0].gpu_uuid == "GPU-e"), "its place tells who it was");
    assert_eq!(
        (read.batches[1].gpus[0].ticks(Tier::Fast), read.batches[1].gpus[0].ticks(Tier::Slow)),
        ([0].as_slice(), [].as_slice())
    );
    assert_eq!(read.values(Metric::TemperatureGpu).len(), 2);
}

#[test]
fn the_event_of_a_lost_gpu_follows_the_batch_that_its_row_is_in() {
    let text = "timestamp, index, temperature.gpu\n2026/03/02 09:00:00.000, 0, 44\n2026/03/02 09:00:00.500, 0, [GPU is lost]\n";
    let kinds: Vec<bool> = Reader::new(text.as_bytes(), options())
        .unwrap()
        .map(|record| matches!(record.unwrap(), Telemetry::Event(_)))
        .collect();
    assert_eq!(kinds, [false, true]);
}

#[test]
fn a_header_in_the_middle_may_change_the_columns_and_is_no_row() {
    let read = read(
        "timestamp, index, temperature.gpu\n2026/03/02 09:00:00.000, 0, 44\n\
         timestamp, index, temperature.gpu, power.draw [W]\n2026/03/02 09:00:00.100, 0, 45, 100.00 W\n\
         timestamp, power.draw [W], index\n2026/03/02 09:00:00.200, 101.00 W, 0\n",
    );
    assert_eq!(read.counts, Counts { lines: 6, headers: 3, rows: 3 });
    assert!(read.losses.is_empty());
    let power: Vec<i64> = read.values(Metric::PowerDraw).iter().map(|(_, _, value)| *value).collect();
    assert_eq!(power, [100_000, 101_000]);
}

#[test]
fn a_cut_line_is_named_and_left_out_wherever_the_writer_was_stopped() {
    let head = "timestamp, index, power.draw [W]\n2026/03/02 09:00:00.000, 0, 300.00 W\n";
    for cut in [
        "2026/03/02 09:00:01.0",
        "2026/03/02 09:00:01.000, 0",
        "2026/03/02 09:00:01.000, 0, 30",
        "2026/03/02 09:00:01.000, 0, 300.00",
    ] {
        for end in ["", "\n", "\ntimestamp, index, power.draw [W]\n2026/03/02 09:10:00.000, 0, 300.00 W\n"] {
            let read = read(&format!("{head}{cut}{end}"));
            let rows = if end.len() > 1 { 2 } else { 1 };
            assert_eq!((read.lost(LostReason::CutLine), read.counts.rows), (1, rows), "{cut:?} {end:?}");
            assert!(read.detail(LostReason::CutLine).starts_with("log.csv:3 "));
        }
    }
    for whole in ["2026/03/02 09:00:01.000, 0, 300.00 W", "2026/03/02 09:00:01.000, 0, [N/A]"] {
        assert_eq!(read(&format!("{head}{whole}")).counts.rows, 2, "{whole}");
    }
}

#[test]
fn a_log_continued_without_units_goes_on() {
    let read = read(
        "timestamp, index, power.draw [W]\n2026/03/02 09:00:00.000, 0, 300.00 W\n2026/03/02 09:00:01.000, 0, 301.00\n\
         2026/03/02 09:00:02.000, 0, 302.00\n",
    );
    assert_eq!((read.counts.rows, read.losses.len()), (3, 0));
}

#[test]
fn lines_that_are_no_rows_are_counted_and_the_first_is_named() {
    let read = read(
        "nohup: ignoring input\ntimestamp, index, temperature.gpu\n2026/03/02 09:00:00.000, 0, 44\n\nFailed to initialize NVML\n\
         2026/03/02 09:00:01.000, 0, 45, 46\nyesterday, 0, 47\n2026/03/02 09:00:02.000, 0, 48,\n",
    );
    assert_eq!(read.counts, Counts { lines: 7, headers: 1, rows: 2 });
    assert_eq!(read.lost(LostReason::UnreadableLine), 4);
    assert_eq!(read.detail(LostReason::UnreadableLine), "log.csv:1 no header names its columns");
}

#[test]
fn a_log_without_any_header_is_an_error_that_names_it_and_says_what_to_add() {
    let error = read_with(b"2026/03/02 09:00:00.112, 0, 45\n", options()).err().unwrap();
    let text = error.to_string();
    assert!(text.contains("log.csv") && text.contains("header line") && text.contains("timestamp, index"), "{text}");
    assert_eq!(read("").counts, Counts::default());
}

#[test]
fn without_a_timestamp_column_every_row_is_counted_as_unreadable() {
    let read = read("index, temperature.gpu\n0, 45\n0, 46\n");
    assert_eq!((read.counts.rows, read.lost(LostReason::UnreadableLine)), (0, 2));
    assert_eq!(read.detail(LostReason::UnreadableLine), "log.csv:2 no timestamp column, so nothing says when");
}

#[test]
fn unknown_columns_are_counted_once_and_those_that_describe_the_board_make_no_noise() {
    let header =
        "timestamp, index, serial, vbios_version, clocks.max.sm [MHz], fabric.state, encoder.stats.sessionCount\n";
    let row = "2026/03/02 09:00:00.000, 0, 123, 96.00, 1980 MHz, N/A, 0\n";
    let read = read(&format!("{header}{row}{header}{row}"));
    assert_eq!(read.lost(LostReason::UnknownColumn), 2);
    assert_eq!(read.detail(LostReason::UnknownColumn), "log.csv:1 fabric.state");
    assert_eq!(read.losses.len(), 1);
}

#[test]
fn local_times_are_moved_by_the_offset_and_labels_come_from_the_file() {
    let text = "timestamp, driver_version, name, temperature.gpu\n2026/03/02 10:00:00.000, 570.86.15, \"NVIDIA X, rev 2\", 44\n\
                2026/03/02 10:00:00.100, 575.1, \"NVIDIA X, rev 2\", 44\n";
    let labels = Labels { rack: Some("r1".to_owned()), ..Labels::default() };
    let read = read_with(text.as_bytes(), Options { tz_offset_seconds: 3600, labels, ..options() }).unwrap();
    assert_eq!(read.batches.len(), 2, "a change of labels begins a batch");
    let batch = &read.batches[0];
    assert_eq!(batch.origin.observed_at, NINE);
    assert_eq!((batch.labels.driver_version.as_deref(), batch.labels.rack.as_deref()), (Some("570.86.15"), Some("r1")));
    assert_eq!(batch.gpus[0].model.as_deref(), Some("NVIDIA X, rev 2"));
}

#[test]
fn a_line_beyond_the_bound_is_counted_as_cut() {
    let long = "x".repeat(MAX_LINE_BYTES + 1);
    let read = read(&format!("timestamp, index, temperature.gpu\n{long}\n2026/03/02 09:00:00.000, 0, 44\n"));
    assert_eq!((read.counts.rows, read.lost(LostReason::CutLine)), (1, 1));
}

/// xorshift64*: the same mutations on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        usize::try_from(self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33).unwrap() % bound
    }
}

#[test]
fn no_mutation_of_a_log_panics_and_every_line_is_a_header_a_row_or_counted() {
    let seeds = [
        "timestamp, index, uuid, pci.bus_id, pstate, power.draw [W], clocks_event_reasons.active\n\
         2026/03/02 09:00:00.112, 0, GPU-aa, 00000000:1B:00.0, P0, 688.12 W, 0x0000000000000004\n\
         2026/03/02 09:00:00.114, 1, GPU-bb, 00000000:43:00.0, P0, [N/A], 0x0000000000000000\n\
         2026/03/02 09:00:01.112, 0, [GPU is lost], \"00000000:1B:00.0\", P0, [GPU is lost], [GPU is lost]\n",
        "timestamp, index, memory.used [MiB]\r\n2026/03/02 09:00:00.112, 0, 70123 MiB\r\ntimestamp, index\r\n2026/03/02 09:00:01.112, 0\r\n",
    ];
    let pieces: &[&[u8]] =
        &[b",", b"\n", b"\"", b"\0", b"\xff", b"[", b"]", b"9", b"-", b" ", b"timestamp,", b"\xe2\x82", b"0x", b"."];
    let mut random = Random(7);
    for round in 0..100_000 {
        let mut bytes = seeds[round % 2].as_bytes().to_vec();
        for _ in 0..1 + random.below(4) {
            let at = random.below(bytes.len());
            match random.below(5) {
                0 => bytes[at] = u8::try_from(random.below(256)).unwrap(),
                1 => drop(bytes.splice(at..at, pieces[random.below(pieces.len())].iter().copied())),
                2 => drop(bytes.drain(at..(at + 1 + random.below(20)).min(bytes.len()))),
                3 => bytes.truncate(at + 1),
                _ => {
                    let copy = bytes[at..(at + random.below(80)).min(bytes.len())].to_vec();
                    let to = random.below(bytes.len());
                    drop(bytes.splice(to..to, copy));
                }
            }
            if bytes.is_empty() {
                bytes.push(b'x');
            }
        }
        match read_with(&bytes, options()) {
            Ok(read) => {
                let lines = read.counts.headers + read.counts.rows;
                let left_out = read.lost(LostReason::UnreadableLine) + read.lost(LostReason::CutLine);
                assert_eq!(
                    read.counts.lines,
                    lines + u64::try_from(left_out).unwrap(),
                    "{}",
                    String::from_utf8_lossy(&bytes)
                );
                let samples: usize = read.batches.iter().map(GpuBatch::sample_count).sum();
                assert_eq!(u64::try_from(samples).unwrap(), read.counts.rows, "{}", String::from_utf8_lossy(&bytes));
            }
            Err(error) => assert!(matches!(error, SourceError::NoHeader { .. }), "{error}"),
        }
    }
}
