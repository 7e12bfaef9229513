//! `gpufleet`: what people type. Without a command it is the demo.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use gpufleet_processor::detect::DetectorsConfig;
use gpufleet_processor::detect::config::KINDS;
use gpufleet_queries::question::QUESTIONS;
use gpufleet_queries::{Format, Limits, Question, Session, format};
use gpufleet_runtime::exit::{Failure, finish, print};
use gpufleet_runtime::logging::{self, LogFormat};
use gpufleet_runtime::topics::{self, DEFAULT_PARTIALS, DEFAULT_PARTITIONS};
use gpufleet_schemas::Topics;
use gpufleet_standalone::{demo, import};

/// Where the lake lies when nothing says otherwise.
const LAKE: &str = "gpufleet-lake";

#[derive(Parser)]
#[command(
    name = "gpufleet",
    version,
    about = "Watches GPU fleets: telemetry to incidents and to SQL",
    max_term_width = 100
)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    demo: DemoArgs,
}

#[derive(Subcommand)]
enum Command {
    /// Simulate an hour of a fleet in a minute, with planted faults, and judge what was found (the default)
    Demo(Box<DemoArgs>),
    /// Read nvidia-smi CSV logs and kernel logs into a lake, with detection
    Import(ImportArgs),
    /// Ask the lake in SQL
    Sql(SqlArgs),
    /// List incidents
    Incidents(IncidentsArgs),
    /// Create and verify the topics of a Kafka cluster
    #[command(subcommand)]
    Topics(TopicsCommand),
}

#[derive(Clone, Copy, Default, PartialEq, ValueEnum)]
enum ReportFormat {
    #[default]
    Table,
    Json,
}

#[derive(Args)]
struct DetectorArgs {
    /// Thresholds that override the shipped detectors.toml
    #[arg(long, value_name = "FILE")]
    detectors: Option<PathBuf>,
    /// Switch a detector off (repeatable)
    #[arg(long, value_name = "KIND", value_parser = KINDS)]
    disable: Vec<String>,
}

impl DetectorArgs {
    fn load(&self) -> Result<DetectorsConfig, Failure> {
        let mut config = DetectorsConfig::load(self.detectors.as_deref())?;
        for kind in &self.disable {
            config.disable(kind)?;
        }
        Ok(config)
    }
}

#[derive(Args)]
struct DemoArgs {
    /// Wall time that the hour of fleet time is stretched over
    #[arg(long = "for", value_name = "SPAN", default_value = "60s", value_parser = humantime::parse_duration)]
    wall: Duration,
    /// GPUs of the fleet, eight a host
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(8..=8192))]
    gpus: u32,
    /// Seed of the fleet and its faults
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Folder of the lake
    #[arg(long, value_name = "DIR", env = "GPUFLEET_LAKE", default_value = LAKE)]
    lake: PathBuf,
    /// A real Kafka cluster instead of the embedded broker
    #[arg(long, value_name = "HOST:PORT")]
    brokers: Option<String>,
    /// Replicas of the topics on a real cluster
    #[arg(long, default_value_t = 1, value_name = "N")]
    replication: i32,
    /// Partitions of the telemetry topic
    #[arg(long, default_value_t = DEFAULT_PARTITIONS, value_parser = clap::value_parser!(i32).range(1..=1024))]
    partitions: i32,
    #[command(flatten)]
    detectors: DetectorArgs,
    /// How the result is printed; json is one object on the last line
    #[arg(long, value_enum, default_value_t)]
    format: ReportFormat,
}

#[derive(Args)]
struct ImportArgs {
    /// nvidia-smi CSV logs and kernel logs (/dev/kmsg, dmesg, journalctl, syslog), in any mix
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Folder of the lake
    #[arg(long, value_name = "DIR", env = "GPUFLEET_LAKE", default_value = LAKE)]
    lake: PathBuf,
    #[command(flatten)]
    recording: gpufleet_collector::cli::RecordingArgs,
    /// Import files that the lake has already, as new
    #[arg(long)]
    again: bool,
    #[command(flatten)]
    detectors: DetectorArgs,
    #[arg(long, value_enum, default_value_t)]
    format: ReportFormat,
}

#[derive(Args)]
struct SqlArgs {
    /// The query; tables: gpu_samples, xid_events, incidents, losses, and the view current_incidents
    #[arg(required_unless_present_any = ["question", "list"], conflicts_with = "question")]
    query: Option<String>,
    /// A named question instead of a query
    #[arg(long, value_name = "NAME")]
    question: Option<String>,
    /// A parameter, written $NAME in the query (repeatable)
    #[arg(long = "set", value_name = "NAME=VALUE", value_parser = parse_parameter)]
    parameters: Vec<(String, String)>,
    /// List the named questions and their parameters
    #[arg(long)]
    list: bool,
    #[command(flatten)]
    lake: LakeArgs,
}

#[derive(Args)]
struct LakeArgs {
    /// Folder of the lake
    #[arg(long, value_name = "DIR", env = "GPUFLEET_LAKE", default_value = LAKE)]
    lake: PathBuf,
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    /// Rows at most
    #[arg(long, default_value_t = 10_000)]
    limit: usize,
    /// Time at most
    #[arg(long, value_name = "SPAN", default_value = "120s", value_parser = humantime::parse_duration)]
    timeout: Duration,
}

#[derive(Args)]
struct IncidentsArgs {
    /// open, resolved or any
    #[arg(long, default_value = "any", value_parser = ["open", "resolved", "any"])]
    state: String,
    /// A kind, such as thermal_throttle
    #[arg(long, default_value = "any")]
    kind: String,
    /// A host
    #[arg(long, default_value = "any")]
    host: String,
    #[command(flatten)]
    lake: LakeArgs,
}

#[derive(Subcommand)]
enum TopicsCommand {
    /// Create the topics that are missing, and verify the others
    Apply {
        #[arg(long, value_name = "HOST:PORT")]
        brokers: String,
        #[arg(long, default_value_t = DEFAULT_PARTITIONS, value_parser = clap::value_parser!(i32).range(1..=1024))]
        partitions: i32,
        /// Partitions of the topic between the two stages of detection
        #[arg(long, default_value_t = DEFAULT_PARTIALS, value_parser = clap::value_parser!(i32).range(1..=1024))]
        partials: i32,
        #[arg(long, default_value_t = 1, value_name = "N")]
        replication: i32,
        /// Goes before the topics' names, for a cluster that is shared
        #[arg(long, value_name = "PREFIX", default_value = "")]
        topic_prefix: String,
        /// How long to wait for a broker
        #[arg(long, value_name = "SPAN", default_value = "30s", value_parser = humantime::parse_duration)]
        patience: Duration,
    },
}

fn parse_parameter(text: &str) -> Result<(String, String), String> {
    text.split_once('=')
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .ok_or_else(|| format!("{text} is not NAME=VALUE"))
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    logging::start("warn", LogFormat::Text);
    let result = match cli.command {
        None => run_demo(&cli.demo),
        Some(Command::Demo(args)) => run_demo(&args),
        Some(Command::Import(args)) => run_import(&args),
        Some(Command::Sql(args)) => run_sql(&args),
        Some(Command::Incidents(args)) => run_incidents(&args),
        Some(Command::Topics(TopicsCommand::Apply {
            brokers,
            partitions,
            partials,
            replication,
            topic_prefix,
            patience,
        })) => {
            let specs = topics::specs(&Topics::with_prefix(&topic_prefix), partitions, partials, replication);
            apply_topics(&brokers, &specs, patience)
        }
    };
    finish("gpufleet", result)
}

fn run_demo(args: &DemoArgs) -> Result<(), Failure> {
    let report = demo::run(&demo::Options {
        wall: args.wall,
        gpus: usize::try_from(args.gpus).unwrap_or(usize::MAX),
        seed: args.seed,
        lake: args.lake.clone(),
        brokers: args.brokers.clone(),
        replication: args.replication,
        partitions: args.partitions,
        detectors: args.detectors.load()?,
        quiet: args.format == ReportFormat::Json,
    })?;
    match args.format {
        ReportFormat::Table => print(&report.text()?)?,
        ReportFormat::Json => print(&format!("{}\n", report.json()))?,
    }
    report.failure().map_or(Ok(()), Err)
}

fn run_import(args: &ImportArgs) -> Result<(), Failure> {
    let report = import::run(&import::Options {
        files: args.files.clone(),
        lake: args.lake.clone(),
        recording: args.recording.options(args.again)?,
        again: args.again,
        detectors: args.detectors.load()?,
        quiet: args.format == ReportFormat::Json,
    })?;
    match args.format {
        ReportFormat::Table => print(&report.text()),
        ReportFormat::Json => print(&format!("{}\n", report.json())),
    }
}

fn ask(lake: &LakeArgs, sql: &str, parameters: &[(String, String)]) -> Result<(), Failure> {
    let runtime =
        tokio::runtime::Runtime::new().map_err(|error| Failure::external(format!("cannot start: {error}")))?;
    let answer = runtime.block_on(async {
        let limits = Limits { rows: lake.limit, time: lake.timeout, ..Limits::default() };
        let session = Session::open(&lake.lake, limits).await?;
        Ok::<_, Failure>(session.run(sql, parameters).await?)
    })?;
    print(&format::render(&answer.batches, lake.format).map_err(|error| Failure::bug(error.to_string()))?)?;
    if answer.cut {
        eprintln!("gpufleet: cut after {} rows; --limit raises that", lake.limit);
    }
    Ok(())
}

fn run_sql(args: &SqlArgs) -> Result<(), Failure> {
    if args.list {
        return list_questions();
    }
    match (&args.query, &args.question) {
        (Some(query), _) => ask(&args.lake, query, &args.parameters),
        (None, Some(name)) => {
            let question = Question::by_name(name).ok_or_else(|| {
                let known: Vec<_> = QUESTIONS.iter().map(|question| question.name).collect();
                Failure::usage(format!("no question is called {name}; there are {}", known.join(", ")))
            })?;
            ask(&args.lake, question.sql, &question.bind(&args.parameters).map_err(Failure::usage)?)
        }
        (None, None) => Err(Failure::usage("give a query, or --question NAME")),
    }
}

fn list_questions() -> Result<(), Failure> {
    let mut text = String::new();
    for question in QUESTIONS {
        text += &format!("{}\n  {}\n", question.name, question.title());
        for parameter in question.parameters() {
            let default =
                parameter.default.map_or_else(|| "required".to_owned(), |default| format!("default {default}"));
            text += &format!("  --set {}=...  {} ({default})\n", parameter.name, parameter.meaning);
        }
    }
    print(&text)
}

fn run_incidents(args: &IncidentsArgs) -> Result<(), Failure> {
    let question = Question::by_name("incidents").ok_or_else(|| Failure::bug("the incidents question is missing"))?;
    let given = [("state", &args.state), ("kind", &args.kind), ("host", &args.host)];
    let given: Vec<_> = given.into_iter().map(|(name, value)| (name.to_owned(), value.clone())).collect();
    ask(&args.lake, question.sql, &question.bind(&given).map_err(Failure::bug)?)
}

fn apply_topics(brokers: &str, specs: &[topics::Spec], patience: Duration) -> Result<(), Failure> {
    let runtime =
        tokio::runtime::Runtime::new().map_err(|error| Failure::external(format!("cannot start: {error}")))?;
    let outcome = runtime.block_on(topics::apply(brokers, specs, patience))?;
    let mut text = String::new();
    outcome.created.iter().for_each(|name| text += &format!("created   {name}\n"));
    outcome
        .verified
        .iter()
        .filter(|name| !outcome.created.contains(name))
        .for_each(|name| text += &format!("verified  {name}\n"));
    outcome.differs.iter().for_each(|what| text += &format!("differs   {what}\n"));
    print(&text)?;
    if outcome.differs.is_empty() {
        return Ok(());
    }
    Err(Failure::new(
        gpufleet_runtime::exit::Fault::Unhealthy,
        "topics that exist differ from what gpufleet needs; change them with the cluster's own tools, nothing here does",
    ))
}
