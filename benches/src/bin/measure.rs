//! `gpufleet-measure`: speeds and sizes of the parts, side by side, on one simulated fleet.
//!
//! Takes no arguments. Prints a table on stdout and writes `benches/runs/<date>-<commit>.json`. Everything runs on one
//! thread and in memory, in rounds that alternate between the parts, so that a slow minute of the machine hits them all.

use std::error::Error;
use std::hint::black_box;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use arrow::array::RecordBatch;
use gpufleet_benches::fleet::{Fleet, GPUS, HERTZ, SEED};
use gpufleet_benches::layouts::{Layout, Message, drain};
use gpufleet_processor::archive::commit::writer_properties;
use gpufleet_processor::archive::rows::{Place, SampleRows};
use gpufleet_processor::detect::task::WANTED;
use gpufleet_processor::detect::{DetectorsConfig, Task};
use gpufleet_processor::engine::book::TaskId;
use gpufleet_processor::engine::{Input, Machine, Output};
use gpufleet_schemas::instant;
use gpufleet_schemas::metric::METRIC_COUNT;
use gpufleet_schemas::record::GpuBatch;
use gpufleet_schemas::table::Table;
use gpufleet_schemas::wire::{Decoder, Encoder};
use parquet::arrow::ArrowWriter;
use serde_json::{Value, json};

/// Fleet time. 76,800 samples: about as many as the demo archives in a flush.
const SECONDS: i64 = 120;
const ROUNDS: usize = 7;
const ROUND: Duration = Duration::from_millis(400);
/// Records that are compressed together, as a producer's batch would be.
const RECORDS_PER_PRODUCER_BATCH: usize = 100;

type Failure = Box<dyn Error>;

/// One part: a pass goes over the whole fleet.
struct Part<'a> {
    name: String,
    pass: Box<dyn FnMut() -> Result<(), Failure> + 'a>,
    /// Samples per second, a value for each round.
    rates: Vec<f64>,
}

impl Part<'_> {
    fn round(&mut self, samples: usize) -> Result<(), Failure> {
        let (start, mut passes) = (Instant::now(), 0);
        while start.elapsed() < ROUND {
            (self.pass)()?;
            passes += 1;
        }
        self.rates.push((passes * samples) as f64 / start.elapsed().as_secs_f64());
        Ok(())
    }
}

fn part<'a>(name: impl Into<String>, pass: impl FnMut() -> Result<(), Failure> + 'a) -> Part<'a> {
    Part { name: name.into(), pass: Box::new(pass), rates: Vec::new() }
}

fn main() -> Result<(), Failure> {
    if cfg!(debug_assertions) {
        return Err("a debug build measures nothing; run with --release".into());
    }
    let fleet = Fleet::simulate(SECONDS)?;
    let encoder = Encoder::default();
    let layouts = Layout::ALL.map(|layout| {
        let messages: Vec<Message> = fleet.batches().map(|batch| layout.encode(batch, &encoder)).collect();
        (layout, messages)
    });

    let mut parts = parts(&fleet, &encoder, &layouts)?;
    for part in &mut parts {
        (part.pass)()?; // caches and allocator warm
    }
    for round in 1..=ROUNDS {
        eprintln!("round {round} of {ROUNDS}");
        for part in &mut parts {
            part.round(fleet.samples)?;
        }
    }

    let wire = layouts.iter().map(|(layout, messages)| Ok((layout.name(), wire_size(messages)?)));
    let wire = wire.collect::<Result<Vec<_>, Failure>>()?;
    let parquet = archive(&fleet)?.len() as f64 / fleet.samples as f64;
    report(&fleet, &parts, &wire, parquet)
}

fn parts<'a>(
    fleet: &'a Fleet,
    encoder: &'a Encoder,
    layouts: &'a [(Layout, Vec<Message>)],
) -> Result<Vec<Part<'a>>, Failure> {
    let (mut all, mut wanted) = (Decoder::default(), Decoder::wanting(WANTED));
    let (config, mut out) = (DetectorsConfig::default(), Vec::new());
    let mut parts = vec![
        part("encode", move || {
            for record in &fleet.records {
                encoder.telemetry(record, &mut out);
                black_box(&out);
            }
            Ok(())
        }),
        part("decode all", move || decode(&mut all, fleet)),
        part("decode what detection wants", move || decode(&mut wanted, fleet)),
        part("detect", move || {
            black_box(detect(fleet, &config));
            Ok(())
        }),
        part("archive", move || {
            black_box(archive(fleet)?);
            Ok(())
        }),
    ];
    for (layout, messages) in layouts {
        let mut decoder = layout.decoder(encoder)?;
        let expected: usize = messages.iter().map(|message| message.records).sum();
        parts.push(part(arrow_avro(layout.name()), move || {
            let records = drain(&mut decoder, messages)?;
            if records == expected { Ok(()) } else { Err(format!("{records} records instead of {expected}").into()) }
        }));
    }
    Ok(parts)
}

fn arrow_avro(layout: &str) -> String {
    format!("arrow-avro, {layout}")
}

fn decode(decoder: &mut Decoder, fleet: &Fleet) -> Result<(), Failure> {
    for payload in &fleet.payloads {
        black_box(decoder.telemetry(payload)?);
    }
    Ok(())
}

/// A fresh task over all records; gives how many incidents it made.
fn detect(fleet: &Fleet, config: &DetectorsConfig) -> usize {
    let id = TaskId { log_id: "bench".to_owned(), topic: "gpu.telemetry".to_owned(), partition: 0 };
    let (mut task, mut outputs) = (Task::new(id, config), Vec::new());
    for (offset, payload) in (0..).zip(&fleet.payloads) {
        task.step(Input { offset, appended_at: None, payload }, &mut outputs);
    }
    outputs.iter().filter(|output| matches!(output, Output::Incident(_))).count()
}

/// One flush: batches to rows, sorted, and to a Parquet file.
fn archive(fleet: &Fleet) -> Result<Vec<u8>, Failure> {
    let mut rows = SampleRows::default();
    for (offset, batch) in (0..).zip(fleet.batches()) {
        let ingested_at = batch.tick_at(batch.ticks.len().saturating_sub(1)) + 1_000 * (offset % 7);
        let place = Place { log_id: "bench", topic: "gpu.telemetry", partition: 0, offset, ingested_at };
        rows.push(place, batch);
    }
    let rows = rows.finish()?;
    let properties = writer_properties(Table::GpuSamples, &rows);
    let file = without_date(&rows)?;
    let mut writer = ArrowWriter::try_new(Vec::new(), file.schema(), Some(properties))?;
    writer.write(&file)?;
    Ok(writer.into_inner()?)
}

/// The file does not hold the partition's value.
fn without_date(rows: &RecordBatch) -> Result<RecordBatch, Failure> {
    let date = rows.schema().index_of("date")?;
    let others: Vec<usize> = (0..rows.num_columns()).filter(|column| *column != date).collect();
    Ok(rows.project(&others)?)
}

/// Bytes per sample, as they are and after zstd.
fn wire_size(messages: &[Message]) -> Result<(f64, f64), Failure> {
    let (mut raw, mut packed) = (0, 0);
    for batch in messages.chunks(RECORDS_PER_PRODUCER_BATCH) {
        let bytes: Vec<u8> = batch.iter().flat_map(|message| &message.bytes).copied().collect();
        raw += bytes.len();
        packed += zstd::bulk::compress(&bytes, 1)?.len();
    }
    let samples: usize = messages.iter().map(|message| message.samples).sum();
    Ok((raw as f64 / samples as f64, packed as f64 / samples as f64))
}

/// Least, middle and greatest.
fn spread(values: &[f64]) -> (f64, f64, f64) {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    (sorted[0], sorted[sorted.len() / 2], sorted[sorted.len() - 1])
}

fn report(fleet: &Fleet, parts: &[Part], wire: &[(&str, (f64, f64))], parquet: f64) -> Result<(), Failure> {
    println!("{:<38} {:>10} {:>10} {:>10}", "million samples a second", "median", "min", "max");
    let mut rates = serde_json::Map::new();
    for Part { name, rates: rounds, .. } in parts {
        let (min, median, max) = spread(rounds);
        println!("{name:<38} {:>10.3} {:>10.3} {:>10.3}", median / 1e6, min / 1e6, max / 1e6);
        rates.insert(name.clone(), json!({ "median": median, "min": min, "max": max, "rounds": rounds }));
    }

    println!("\n{:<38} {:>10} {:>10} {:>10}", "times as fast as", "median", "min", "max");
    let mut ratios = serde_json::Map::new();
    let ours = Layout::Differences.name();
    for (part, baseline) in
        [("decode all", arrow_avro(ours)), ("decode all", arrow_avro("rows")), ("detect", arrow_avro(ours))]
    {
        let rounds = |name: &str| parts.iter().find(|part| part.name == name).map(|part| &part.rates);
        let (Some(above), Some(below)) = (rounds(part), rounds(&baseline)) else { continue };
        let paired: Vec<f64> = above.iter().zip(below).map(|(above, below)| above / below).collect();
        let ((min, median, max), name) = (spread(&paired), format!("{part} / {baseline}"));
        println!("{name:<38} {median:>10.2} {min:>10.2} {max:>10.2}");
        ratios.insert(name, json!({ "median": median, "min": min, "max": max }));
    }

    println!("\n{:<38} {:>10} {:>10}", "bytes a sample", "raw", "zstd 1");
    let mut sizes = serde_json::Map::new();
    for (layout, (raw, packed)) in wire {
        println!("{:<38} {raw:>10.2} {packed:>10.2}", format!("wire, {layout}"));
        sizes.insert((*layout).to_owned(), json!({ "raw": raw, "zstd_1": packed }));
    }
    println!("{:<38} {:>10} {parquet:>10.2}", "Parquet", "");

    let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let measured_at = instant::text(i64::try_from(now.as_micros())?);
    let commit = commit();
    let run = json!({
        "measured_at": measured_at,
        "commit": commit,
        "machine": machine()?,
        "data": {
            "gpus": GPUS, "hertz": HERTZ, "seconds": SECONDS, "seed": SEED, "metrics": METRIC_COUNT,
            "batches": fleet.batches().map(GpuBatch::sample_count).count(), "samples": fleet.samples,
            "records_per_producer_batch": RECORDS_PER_PRODUCER_BATCH,
        },
        "samples_per_second": rates,
        "ratios": ratios,
        "wire_bytes_per_sample": sizes,
        "parquet_bytes_per_row": parquet,
    });
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("runs");
    let file = folder.join(format!("{}-{commit}.json", &measured_at[..10]));
    std::fs::create_dir_all(&folder)?;
    std::fs::write(&file, format!("{run:#}\n"))?;
    eprintln!("wrote {}", file.display());
    Ok(())
}

fn machine() -> Result<Value, Failure> {
    let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let cores = std::thread::available_parallelism()?.get();
    Ok(json!({ "cores": cores, "cpu": model.map_or("unknown", |(_, model)| model.trim()) }))
}

/// What was measured; `-dirty` when the work tree holds more than the commit.
fn commit() -> String {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).current_dir(env!("CARGO_MANIFEST_DIR")).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let Some(commit) = git(&["rev-parse", "--short", "HEAD"]) else { return "unknown".to_owned() };
    let changed = git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|changed| !changed.is_empty());
    if changed { commit + "-dirty" } else { commit }
}
