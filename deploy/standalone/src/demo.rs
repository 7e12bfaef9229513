//! The demo: an hour of a simulated fleet in a minute, with planted faults and look-alikes, and its judgement.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use gpufleet_collector::publisher::Pace;
use gpufleet_collector::simulator::{Decoy, FleetOptions, Label, Ledger, Simulator};
use gpufleet_processor::detect::DetectorsConfig;
use gpufleet_queries::{Format, Limits, Question, Session, format};
use gpufleet_runtime::exit::{Failure, Fault};
use gpufleet_schemas::instant::{self, SECOND};
use serde_json::json;

use crate::judge::{self, Found, Verdict};
use crate::pipeline::{self, Outcome};
use crate::view::View;

/// Fleet time of a run.
const SPAN: i64 = 3600 * SECOND;
/// 2026-03-02T09:00:00Z: a Monday morning. The same for every run, so that a seed gives the same records.
const START_AT: i64 = 1_772_442_000 * SECOND;
/// A larger fleet than this is sampled at 1 Hz, so that the run still fits its minute on two cores.
const FAST_UP_TO_GPUS: usize = 64;

/// What to show.
#[derive(Clone, Debug)]
pub struct Options {
    /// Wall time that the hour of fleet time is stretched over; less where the machine is slower.
    pub wall: Duration,
    pub gpus: usize,
    pub seed: u64,
    pub lake: PathBuf,
    pub brokers: Option<String>,
    pub replication: i32,
    pub partitions: i32,
    pub detectors: DetectorsConfig,
    /// No live view, for programs.
    pub quiet: bool,
}

/// Everything that a run has shown.
#[derive(Clone, Debug)]
pub struct Report {
    pub planted: Vec<Label>,
    pub found: Vec<Found>,
    pub decoys: Vec<Decoy>,
    pub verdict: Verdict,
    pub outcome: Outcome,
    pub rows_in_lake: u64,
    pub lake: PathBuf,
    pub elapsed: Duration,
}

/// Runs the demo to its end.
pub fn run(options: &Options) -> Result<Report, Failure> {
    let start = Instant::now();
    let run = uuid::Uuid::new_v4().simple().to_string();
    let mut simulator = Simulator::new(FleetOptions {
        seed: options.seed,
        gpus: options.gpus,
        start_at: START_AT,
        span: SPAN,
        fast_hertz: if options.gpus <= FAST_UP_TO_GPUS { 10 } else { 1 },
        run: run.clone(),
    });
    let ledger = simulator.ledger();
    let pipeline = pipeline::Options {
        brokers: options.brokers.clone(),
        // A run of its own on a cluster that may hold others: its time is not theirs.
        topic_prefix: if options.brokers.is_some() { format!("demo-{}.", &run[..8]) } else { String::new() },
        partitions: options.partitions,
        replication: options.replication,
        lake: options.lake.clone(),
        detectors: options.detectors.clone(),
        run: run.clone(),
        flush_rows: 250_000,
        flush_every: Duration::from_secs(10),
        patience: Duration::from_secs(30),
    };
    let speed = SPAN as f64 / SECOND as f64 / options.wall.as_secs_f64().max(0.001);
    let pace = Pace::Scaled { start, from: START_AT, speed };
    let mut view = View::new(START_AT, SPAN, options.quiet)?;
    let outcome = pipeline::run(&mut simulator, &pace, &pipeline, &mut view)?;
    drop(view);
    let runtime =
        tokio::runtime::Runtime::new().map_err(|error| Failure::external(format!("cannot start: {error}")))?;
    let (found, rows_in_lake) = runtime.block_on(async {
        let session = Session::open(&options.lake, Limits::default()).await?;
        let found = judge::found(&session, &outcome.log_id).await?;
        Ok::<_, Failure>((found, judge::rows_of(&session, "gpu_samples", &outcome.log_id).await?))
    })?;
    let Ledger { labels, decoys } = ledger.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
    let verdict = judge::compare(&labels, &found);
    let lake = options.lake.canonicalize().unwrap_or_else(|_| options.lake.clone());
    Ok(Report { planted: labels, found, decoys, verdict, outcome, rows_in_lake, lake, elapsed: start.elapsed() })
}

impl Report {
    /// Everything planted was found, nothing else was, and every acknowledged sample is a row.
    pub fn healthy(&self) -> bool {
        self.verdict.equal() && self.rows_in_lake == self.outcome.samples_acked
    }

    /// The fault of a run that did not come out as it must.
    pub fn failure(&self) -> Option<Failure> {
        if self.healthy() {
            return None;
        }
        let mut says = Vec::new();
        for label in &self.verdict.missed {
            says.push(format!(
                "missed {} on {} {} at {}",
                label.kind,
                label.host,
                label.gpu,
                instant::text(label.onset_at)
            ));
        }
        for found in &self.verdict.extra {
            let gpu = found.gpu.as_deref().unwrap_or("-");
            says.push(format!(
                "not planted: {} on {} {gpu} at {}",
                found.kind,
                found.host,
                instant::text(found.onset_at)
            ));
        }
        if self.rows_in_lake != self.outcome.samples_acked {
            says.push(format!(
                "{} samples acknowledged, {} rows in the lake",
                self.outcome.samples_acked, self.rows_in_lake
            ));
        }
        Some(Failure::new(Fault::Unhealthy, format!("the demo did not find what was planted: {}", says.join("; "))))
    }

    /// One object, on one line.
    pub fn json(&self) -> String {
        let planted: Vec<_> = self
            .planted
            .iter()
            .map(|label| {
                let (onset, end) = (instant::text(label.onset_at), label.end_at.map(instant::text));
                json!({"kind": label.kind, "host": label.host, "gpu": label.gpu, "onset": onset, "end": end})
            })
            .collect();
        let object = json!({
            "planted": planted,
            "found": self.found,
            "decoys": self.decoys,
            "samples_acked": self.outcome.samples_acked,
            "rows_in_lake": self.rows_in_lake,
            "events_acked": self.outcome.events_acked,
            "dead_letters": self.outcome.archive.dead_letters,
            "lake": self.lake,
            "log_id": self.outcome.log_id,
            "elapsed_s": (self.elapsed.as_secs_f64() * 10.0).round() / 10.0,
        });
        object.to_string()
    }

    /// For a person: planted against found, two post-mortem questions, and what to type next.
    pub fn text(&self) -> Result<String, Failure> {
        let mut text = String::from("\nPlanted against found\n");
        for (kind, (planted, found, right)) in &self.verdict.kinds {
            text +=
                &format!("  {kind:<18} {planted:>3} planted  {found:>3} found  {right:>3} where and when planted\n");
        }
        text += &format!(
            "  {:<18} {:>3} look-alikes, {} of them taken for a fault\n",
            "silence",
            self.decoys.len(),
            self.verdict.extra.len()
        );
        text += &format!(
            "  {:<18} {} samples acknowledged, {} rows in the lake\n",
            "nothing lost", self.outcome.samples_acked, self.rows_in_lake
        );
        let runtime =
            tokio::runtime::Runtime::new().map_err(|error| Failure::external(format!("cannot start: {error}")))?;
        text += &runtime.block_on(self.post_mortems())?;
        let lake = self.lake.display();
        text += &format!("\nThe lake is at {lake}. What to type next:\n");
        text += &format!("  gpufleet incidents --lake {lake}\n");
        text += &format!(
            "  gpufleet sql --lake {lake} \"SELECT host, max(temperature_gpu_celsius) FROM gpu_samples GROUP BY host\"\n"
        );
        text += &format!("  gpufleet sql --lake {lake} --list\n");
        text += "  gpufleet import YOUR-NVIDIA-SMI.csv YOUR-DMESG.txt\n";
        Ok(text)
    }

    async fn post_mortems(&self) -> Result<String, Failure> {
        let session = Session::open(&self.lake, Limits::default()).await?;
        let mut text = String::new();
        let throttled = self.found.iter().find(|found| found.kind == "thermal_throttle").or(self.found.first());
        let mut questions = vec![("throttled_gpus", vec![("log".to_owned(), self.outcome.log_id.clone())])];
        if let Some(incident) = throttled {
            let parameters = vec![("incident".to_owned(), incident.id.clone()), ("minutes".to_owned(), "4".to_owned())];
            questions.push(("before_incident", parameters));
        }
        for (name, given) in questions {
            let question =
                Question::by_name(name).ok_or_else(|| Failure::bug(format!("no question is called {name}")))?;
            let parameters = question.bind(&given).map_err(Failure::bug)?;
            let answer = session.run(question.sql, &parameters).await?;
            let table =
                format::render(&answer.batches, Format::Table).map_err(|error| Failure::bug(error.to_string()))?;
            text += &format!("\n{} (queries/sql/{name}.sql)\n{table}", question.title());
        }
        Ok(text)
    }
}
