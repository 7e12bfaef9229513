//! `gpufleet-processor`: detection and the archive, each a process of its own on a real cluster.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use gpufleet_processor::detect::DetectorsConfig;
use gpufleet_processor::detect::config::KINDS;
use gpufleet_processor::{archive, detect};
use gpufleet_runtime::exit::{Failure, finish, print};
use gpufleet_runtime::kafka::BrokerArgs;
use gpufleet_runtime::logging::{self, LogFormat};
use gpufleet_runtime::progress::Progress;
use gpufleet_runtime::topics::INCIDENT_PARTITIONS;
use gpufleet_schemas::Topics;
use gpufleet_schemas::instant;

#[derive(Parser)]
#[command(
    name = "gpufleet-processor",
    version,
    about = "Turns telemetry into incidents and into the lake",
    max_term_width = 100
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[arg(long, global = true, value_enum, default_value_t)]
    log_format: LogFormat,
}

#[derive(Subcommand)]
enum Command {
    /// Detect: gpu.telemetry to incidents
    Detect {
        #[command(flatten)]
        broker: BrokerArgs,
        /// End when no record has come for so long (default: run for ever)
        #[arg(long, value_name = "SPAN", value_parser = humantime::parse_duration)]
        stop_when_idle: Option<Duration>,
        /// Thresholds that override the shipped detectors.toml
        #[arg(long, value_name = "FILE")]
        detectors: Option<PathBuf>,
        /// Switch a detector off (repeatable)
        #[arg(long, value_name = "KIND", value_parser = KINDS)]
        disable: Vec<String>,
    },
    /// Archive: gpu.telemetry and incidents to the lake, exactly once
    Archive {
        #[command(flatten)]
        broker: BrokerArgs,
        /// End when no record has come for so long (default: run for ever)
        #[arg(long, value_name = "SPAN", value_parser = humantime::parse_duration)]
        stop_when_idle: Option<Duration>,
        /// Folder of the lake
        #[arg(long, value_name = "DIR", env = "GPUFLEET_LAKE")]
        lake: PathBuf,
        /// Commit when so many samples wait
        #[arg(long, default_value_t = 250_000)]
        flush_rows: usize,
        /// Commit at least so often
        #[arg(long, value_name = "SPAN", default_value = "30s", value_parser = humantime::parse_duration)]
        flush_every: Duration,
    },
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    logging::start("info", cli.log_format);
    let result = match cli.command {
        Command::Detect { broker, stop_when_idle, detectors, disable } => {
            detect(broker, stop_when_idle, detectors.as_deref(), &disable)
        }
        Command::Archive { broker, stop_when_idle, lake, flush_rows, flush_every } => {
            archive(broker, stop_when_idle, lake, flush_rows, flush_every)
        }
    };
    finish("gpufleet-processor", result)
}

fn detect(
    broker: BrokerArgs,
    stop_when_idle: Option<Duration>,
    detectors: Option<&std::path::Path>,
    disable: &[String],
) -> Result<(), Failure> {
    let mut config = DetectorsConfig::load(detectors)?;
    disable.iter().try_for_each(|kind| config.disable(kind))?;
    let progress = Progress::new(broker.partitions);
    progress.stop_on_signal()?;
    let options = detect::consumer::Options {
        topics: Topics::with_prefix(&broker.topic_prefix),
        brokers: broker.brokers,
        partitions: broker.partitions,
        log_id: None,
        config,
        patience: broker.patience,
        stop_when_idle,
    };
    let report = detect::consumer::run(&options, &progress, |incident| {
        tracing::info!(
            incident_id = incident.id,
            incident_kind = incident.kind,
            revision = incident.revision,
            state = %incident.state,
            severity = %incident.severity,
            host = incident.host,
            onset = instant::text(incident.onset_at),
            "{}", incident.summary
        );
    })?;
    let counts = report.counts;
    print(&format!(
        "{} records read, {} undecodable, {} duplicates, {} too late, {} from the future; {} incident revisions sent, {} were out already\n",
        counts.records,
        counts.undecodable,
        counts.duplicates,
        counts.too_late,
        counts.from_the_future,
        report.incidents_sent,
        report.incidents_suppressed
    ))
}

fn archive(
    broker: BrokerArgs,
    stop_when_idle: Option<Duration>,
    lake: PathBuf,
    flush_rows: usize,
    flush_every: Duration,
) -> Result<(), Failure> {
    let telemetry = Progress::new(broker.partitions);
    telemetry.stop_on_signal()?;
    let options = archive::consumer::Options {
        topics: Topics::with_prefix(&broker.topic_prefix),
        brokers: broker.brokers,
        partitions: broker.partitions,
        log_id: None,
        lake,
        flush_rows,
        flush_every,
        patience: broker.patience,
        stop_when_idle,
    };
    let report = archive::consumer::run(&options, &telemetry, &Progress::new(INCIDENT_PARTITIONS))?;
    print(&format!(
        "{} samples, {} events, {} incident revisions and {} losses written; {} dead letters, {} duplicates dropped\n",
        report.samples, report.events, report.incidents, report.losses, report.dead_letters, report.duplicates
    ))
}
