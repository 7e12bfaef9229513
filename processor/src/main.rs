//! `gpufleet-processor`: detection and the archive, each a process of its own on a real cluster.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use gpufleet_processor::detect::DetectorsConfig;
use gpufleet_processor::detect::config::KINDS;
use gpufleet_processor::detect::consumer::ClockSource;
use gpufleet_processor::replay::difference::{Range, compare};
use gpufleet_processor::{archive, detect, replay};
use gpufleet_runtime::exit::{Failure, finish, print};
use gpufleet_runtime::kafka::{BrokerArgs, GroupArgs};
use gpufleet_runtime::logging::{self, LogFormat};
use gpufleet_runtime::progress::Progress;
use gpufleet_runtime::topics::{DEFAULT_PARTIALS, DEFAULT_PARTITIONS, INCIDENT_PARTITIONS};
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
    Detect(Box<DetectArgs>),
    /// Replay: what these rules would have said about a range of the log, against what was said then
    Replay(Box<ReplayArgs>),
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

#[derive(Args)]
struct DetectArgs {
    #[command(flatten)]
    broker: BrokerArgs,
    /// Partitions of the partials topic; must be what the topic has
    #[arg(long, default_value_t = DEFAULT_PARTIALS, value_parser = clap::value_parser!(i32).range(1..=1024))]
    partials: i32,
    #[command(flatten)]
    group: GroupArgs,
    /// Folder of the snapshots, shared by every process of the group
    #[arg(long, value_name = "DIR", env = "GPUFLEET_SNAPSHOTS")]
    snapshots: PathBuf,
    /// Snapshot at least so often
    #[arg(long, value_name = "SPAN", default_value = "30s", value_parser = humantime::parse_duration)]
    snapshot_every: Duration,
    /// Who writes the time of the telemetry topic
    #[arg(long, value_enum, default_value_t = ClockSource::Wall)]
    clock: ClockSource,
    /// Consumers of the telemetry topic in this process
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    threads: u32,
    /// End when no record has come for so long (default: run for ever)
    #[arg(long, value_name = "SPAN", value_parser = humantime::parse_duration)]
    stop_when_idle: Option<Duration>,
    #[command(flatten)]
    rules: RulesArgs,
}

#[derive(Args)]
struct RulesArgs {
    /// Thresholds that override the shipped detectors.toml
    #[arg(long, value_name = "FILE")]
    detectors: Option<PathBuf>,
    /// Switch a detector off (repeatable)
    #[arg(long, value_name = "KIND", value_parser = KINDS)]
    disable: Vec<String>,
}

impl RulesArgs {
    fn load(&self) -> Result<DetectorsConfig, Failure> {
        let mut config = DetectorsConfig::load(self.detectors.as_deref())?;
        self.disable.iter().try_for_each(|kind| config.disable(kind))?;
        Ok(config)
    }
}

#[derive(Args)]
#[command(group = clap::ArgGroup::new("source").required(true).args(["lake", "brokers"]))]
struct ReplayArgs {
    /// Read the log from this lake
    #[arg(long, value_name = "DIR")]
    lake: Option<PathBuf>,
    /// Which log of the lake, where it holds several
    #[arg(long, value_name = "ID", requires = "lake")]
    log: Option<String>,
    /// Read the log from Kafka, as far as the topics still hold it
    #[arg(long, value_name = "HOST:PORT")]
    brokers: Option<String>,
    /// Partitions of the telemetry topic on Kafka
    #[arg(long, default_value_t = DEFAULT_PARTITIONS, value_parser = clap::value_parser!(i32).range(1..=1024))]
    partitions: i32,
    /// Goes before the topics' names, for a cluster that is shared
    #[arg(long, value_name = "PREFIX", default_value = "")]
    topic_prefix: String,
    /// Compare from this instant on, such as 2026-03-02T09:00:00Z (default: from the start of the log)
    #[arg(long, value_name = "INSTANT", value_parser = parse_instant)]
    from: Option<i64>,
    /// Compare up to this instant (default: to the end of the log)
    #[arg(long, value_name = "INSTANT", value_parser = parse_instant)]
    to: Option<i64>,
    #[command(flatten)]
    rules: RulesArgs,
    #[arg(long, value_enum, default_value_t)]
    format: ReplayFormat,
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum ReplayFormat {
    #[default]
    Text,
    Json,
}

fn parse_instant(text: &str) -> Result<i64, String> {
    let at = humantime::parse_rfc3339_weak(text)
        .map_err(|error| format!("{text} is no instant such as 2026-03-02T09:00:00Z ({error})"))?;
    let since = at.duration_since(std::time::UNIX_EPOCH).map_err(|_| format!("{text} lies before 1970"))?;
    i64::try_from(since.as_micros()).map_err(|_| format!("{text} is too far ahead"))
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    logging::start("info", cli.log_format);
    let result = match cli.command {
        Command::Detect(args) => detect(*args),
        Command::Replay(args) => replay(&args),
        Command::Archive { broker, stop_when_idle, lake, flush_rows, flush_every } => {
            archive(broker, stop_when_idle, lake, flush_rows, flush_every)
        }
    };
    finish("gpufleet-processor", result)
}

fn detect(args: DetectArgs) -> Result<(), Failure> {
    let (config, broker) = (args.rules.load()?, args.broker);
    let progress = Progress::new(broker.partitions);
    progress.stop_on_signal()?;
    let options = detect::consumer::Options {
        topics: Topics::with_prefix(&broker.topic_prefix),
        brokers: broker.brokers,
        partitions: broker.partitions,
        partials: args.partials,
        log_id: None,
        config,
        group: args.group,
        clock: args.clock,
        threads: args.threads,
        snapshots: Some(args.snapshots),
        snapshot_every: args.snapshot_every,
        patience: broker.patience,
        stop_when_idle: args.stop_when_idle,
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
    let (counts, work) = (report.counts, report.work);
    print(&format!(
        "{} records read, {} undecodable, {} duplicates, {} too late, {} from the future; {} incident revisions sent, {} were out already; {} snapshots stored, {} failed, {} contradictions\n",
        counts.records,
        counts.undecodable,
        counts.duplicates,
        counts.too_late,
        counts.from_the_future,
        work.incidents_sent,
        work.incidents_suppressed,
        work.snapshots,
        work.snapshots_failed,
        work.contradictions
    ))
}

/// Runs the rules over the log and prints what they change.
fn replay(args: &ReplayArgs) -> Result<(), Failure> {
    let config = args.rules.load()?;
    let range = Range { from: args.from.unwrap_or(i64::MIN), to: args.to.unwrap_or(i64::MAX) };
    if range.from >= range.to {
        return Err(Failure::usage("--from must lie before --to"));
    }
    let (then, now, first_at) = match (&args.lake, &args.brokers) {
        (Some(lake), _) => replay::from_lake(lake, args.log.as_deref(), &config, range)?,
        (None, Some(brokers)) => {
            let topics = Topics::with_prefix(&args.topic_prefix);
            replay::from_kafka(brokers, &topics, args.partitions, &config)?
        }
        (None, None) => return Err(Failure::usage("--lake or --brokers says where the log is")),
    };
    let difference = compare(&then, &now, range, first_at);
    match args.format {
        ReplayFormat::Text => print(&difference.text()),
        ReplayFormat::Json => {
            let text = serde_json::to_string(&difference).map_err(|error| Failure::bug(error.to_string()))?;
            print(&format!("{text}\n"))
        }
    }
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
