//! The live view: progress, and incidents in plain words as they open and resolve. On stderr.

use std::io::IsTerminal;

use gpufleet_runtime::exit::Failure;
use gpufleet_schemas::instant;
use gpufleet_schemas::record::{Incident, State, Telemetry};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::pipeline::Watcher;

/// Shows a run from `start_at` over `span` microseconds of source time.
pub struct View {
    bar: ProgressBar,
    terminal: bool,
    quiet: bool,
    start_at: i64,
    span: i64,
    samples: u64,
    shown_tenth: i64,
}

impl View {
    pub fn new(start_at: i64, span: i64, quiet: bool) -> Result<View, Failure> {
        let terminal = std::io::stderr().is_terminal();
        let style = ProgressStyle::with_template("{bar:30.green} {percent:>3} %  {msg}  {elapsed}")
            .map_err(|error| Failure::bug(format!("the progress bar has no form: {error}")))?;
        let target =
            if quiet || !terminal { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr_with_hz(5) };
        let bar = ProgressBar::with_draw_target(Some(1000), target).with_style(style);
        Ok(View { bar, terminal: terminal && !quiet, quiet, start_at, span: span.max(1), samples: 0, shown_tenth: -1 })
    }

    fn say(&self, line: &str) {
        if self.terminal {
            self.bar.println(line);
        } else if !self.quiet {
            eprintln!("{line}");
        }
    }
}

/// Hours, minutes and seconds of an instant.
fn clock(at: i64) -> String {
    instant::text(at).get(11..19).unwrap_or_default().to_owned()
}

impl Watcher for View {
    fn record(&mut self, record: &Telemetry) {
        if let Telemetry::Batch(batch) = record {
            self.samples += batch.sample_count() as u64;
        }
        let at = record.newest_at();
        let thousandth = ((at - self.start_at).max(0) * 1000 / self.span).min(1000);
        self.bar.set_position(thousandth.unsigned_abs());
        if self.terminal {
            self.bar.set_message(format!("fleet time {}  {} samples", clock(at), self.samples));
        } else if thousandth / 100 > self.shown_tenth {
            self.shown_tenth = thousandth / 100;
            self.say(&format!("fleet time {}  {} % of the run  {} samples", clock(at), thousandth / 10, self.samples));
        }
    }

    fn incident(&mut self, incident: &Incident) {
        let what = match (incident.state, incident.revision) {
            (State::Resolved, _) => "resolved",
            (_, 0) => "OPENED  ",
            _ => "changed ",
        };
        let at = clock(incident.end_at.unwrap_or(incident.onset_at));
        self.say(&format!("{at}  {what}  {:<9} {:<17} {}", incident.severity, incident.kind, incident.summary));
    }

    fn draining(&mut self) {
        self.bar.set_position(1000);
        self.bar.set_message("writing the rest to the lake");
    }
}

impl Drop for View {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
