//! `import`: the same pipeline on people's files.

use std::path::PathBuf;
use std::time::Duration;

use arrow::array::AsArray;
use gpufleet_collector::publisher::Pace;
use gpufleet_collector::source::recording::{FileSummary, Recording, RecordingOptions};
use gpufleet_processor::detect::DetectorsConfig;
use gpufleet_queries::{Limits, Session};
use gpufleet_runtime::exit::Failure;
use gpufleet_runtime::lake::Lake;
use gpufleet_schemas::instant;
use gpufleet_schemas::record::{Incident, State, Telemetry};
use serde_json::json;

use crate::judge;
use crate::pipeline::{self, Outcome, Watcher};

/// Partitions of the embedded broker: a few files need no more.
const PARTITIONS: i32 = 4;

/// What to import, and where to.
#[derive(Clone, Debug)]
pub struct Options {
    pub files: Vec<PathBuf>,
    pub lake: PathBuf,
    pub recording: RecordingOptions,
    /// Import files that the lake has already.
    pub again: bool,
    pub detectors: DetectorsConfig,
    pub quiet: bool,
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct Report {
    pub files: Vec<FileSummary>,
    /// Files that the lake had already.
    pub skipped: Vec<PathBuf>,
    pub outcome: Option<Outcome>,
    pub rows_in_lake: u64,
    pub events_in_lake: u64,
    pub incidents: Vec<Incident>,
    pub lake: PathBuf,
}

/// Keeps the newest revision of every incident, and says that there is progress.
struct Collect {
    incidents: Vec<Incident>,
    records: u64,
    quiet: bool,
}

impl Watcher for Collect {
    fn record(&mut self, _: &Telemetry) {
        self.records += 1;
        if !self.quiet && self.records.is_multiple_of(100_000) {
            eprintln!("{} records published", self.records);
        }
    }

    fn incident(&mut self, incident: &Incident) {
        match self.incidents.iter_mut().find(|known| known.id == incident.id) {
            Some(known) => *known = incident.clone(),
            None => self.incidents.push(incident.clone()),
        }
    }
}

/// Imports the files that the lake does not have.
pub fn run(options: &Options) -> Result<Report, Failure> {
    let runtime =
        tokio::runtime::Runtime::new().map_err(|error| Failure::external(format!("cannot start: {error}")))?;
    let all = open(&options.files, options)?;
    let known = runtime.block_on(async {
        Lake::create(&options.lake).await?;
        known_boots(&options.lake).await
    })?;
    let lake = options.lake.canonicalize().unwrap_or_else(|_| options.lake.clone());
    let (skipped, wanted): (Vec<_>, Vec<_>) = all
        .files()
        .iter()
        .map(|file| (file.path.clone(), known.contains(&file.boot_id)))
        .partition(|(_, known)| *known);
    let skipped: Vec<PathBuf> = skipped.into_iter().map(|(path, _)| path).collect();
    let wanted: Vec<PathBuf> = wanted.into_iter().map(|(path, _)| path).collect();
    let mut report = Report {
        files: Vec::new(),
        skipped,
        outcome: None,
        rows_in_lake: 0,
        events_in_lake: 0,
        incidents: Vec::new(),
        lake,
    };
    if wanted.is_empty() {
        return Ok(report);
    }
    let mut recording = if report.skipped.is_empty() { all } else { open(&wanted, options)? };
    let pipeline = pipeline::Options {
        brokers: None,
        topic_prefix: String::new(),
        partitions: PARTITIONS,
        replication: 1,
        lake: options.lake.clone(),
        detectors: options.detectors.clone(),
        run: uuid::Uuid::new_v4().simple().to_string(),
        flush_rows: 250_000,
        // One commit a table for all but the largest files.
        flush_every: Duration::from_secs(600),
        patience: Duration::from_secs(30),
    };
    let mut watcher = Collect { incidents: Vec::new(), records: 0, quiet: options.quiet };
    let outcome = pipeline::run(&mut recording, &Pace::Unbound, &pipeline, &mut watcher)?;
    (report.rows_in_lake, report.events_in_lake) = runtime.block_on(async {
        let session = Session::open(&options.lake, Limits::default()).await?;
        let samples = judge::rows_of(&session, "gpu_samples", &outcome.log_id).await?;
        Ok::<_, Failure>((samples, judge::rows_of(&session, "xid_events", &outcome.log_id).await?))
    })?;
    report.files = recording.summary();
    report.incidents = watcher.incidents;
    if report.rows_in_lake != outcome.samples_acked || report.events_in_lake != outcome.events_acked {
        return Err(Failure::bug(format!(
            "{} samples and {} events were acknowledged but the lake has {} and {}",
            outcome.samples_acked, outcome.events_acked, report.rows_in_lake, report.events_in_lake
        )));
    }
    report.outcome = Some(outcome);
    Ok(report)
}

fn open(files: &[PathBuf], options: &Options) -> Result<Recording, Failure> {
    Ok(Recording::open(files, &options.recording)?)
}

/// Identities of the files that the lake holds.
async fn known_boots(lake: &std::path::Path) -> Result<Vec<String>, Failure> {
    let session = Session::open(lake, Limits { rows: usize::MAX, ..Limits::default() }).await?;
    let sql = "SELECT boot_id FROM gpu_samples WHERE boot_id LIKE 'file:%' \
               UNION SELECT boot_id FROM xid_events WHERE boot_id LIKE 'file:%' \
               UNION SELECT boot_id FROM losses WHERE boot_id LIKE 'file:%'";
    let answer = session.run(sql, &[]).await?;
    let mut boots = Vec::new();
    for batch in &answer.batches {
        let column = arrow::compute::cast(batch.column(0), &arrow::datatypes::DataType::Utf8)
            .map_err(|error| Failure::bug(error.to_string()))?;
        boots.extend(column.as_string::<i32>().iter().flatten().map(str::to_owned));
    }
    Ok(boots)
}

impl Report {
    pub fn json(&self) -> String {
        let files: Vec<_> = self
            .files
            .iter()
            .map(|file| {
                let losses: Vec<_> = file
                    .losses
                    .iter()
                    .map(|lost| json!({"reason": lost.reason, "count": lost.count, "detail": lost.detail}))
                    .collect();
                json!({"file": file.path, "kind": file.kind, "host": file.host, "samples": file.rows, "events": file.events,
                       "left_out": losses})
            })
            .collect();
        let incidents: Vec<_> = self
            .incidents
            .iter()
            .map(|incident| {
                json!({"id": incident.id, "kind": incident.kind, "severity": incident.severity, "state": incident.state,
                       "host": incident.host, "gpu": incident.gpu_uuid, "onset": instant::text(incident.onset_at),
                       "end": incident.end_at.map(instant::text), "summary": incident.summary, "actions": incident.actions})
            })
            .collect();
        json!({"files": files, "skipped": self.skipped, "samples": self.rows_in_lake, "events": self.events_in_lake,
               "incidents": incidents, "lake": self.lake})
        .to_string()
    }

    /// For a person.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for path in &self.skipped {
            text += &format!(
                "{}: the lake has it already; nothing was added (--again imports it as new)\n",
                path.display()
            );
        }
        for file in &self.files {
            text += &format!(
                "{}: {}, host {}: {} samples, {} events\n",
                file.path.display(),
                file.kind,
                file.host,
                file.rows,
                file.events
            );
            for lost in &file.losses {
                let detail = lost.detail.as_deref().map_or(String::new(), |detail| format!(" (first: {detail})"));
                text += &format!("  left out: {} {}{detail}\n", lost.count, lost.reason.as_str().replace('_', " "));
            }
        }
        text += &format!(
            "{} samples and {} events are new in the lake {}\n",
            self.rows_in_lake,
            self.events_in_lake,
            self.lake.display()
        );
        if self.incidents.is_empty() {
            text += "no incidents\n";
        }
        for incident in &self.incidents {
            let end = match (incident.state, incident.end_at) {
                (State::Resolved, Some(end)) => format!("until {}", instant::text(end)),
                _ => "still open".to_owned(),
            };
            text += &format!(
                "{} {} {}, {end}\n  {}\n",
                instant::text(incident.onset_at),
                incident.severity,
                incident.kind,
                incident.summary
            );
            if !incident.actions.is_empty() {
                text += &format!("  do: {}\n", incident.actions.join("; "));
            }
        }
        text
    }
}
