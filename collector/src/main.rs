//! `gpufleet-collector`: the agent of a GPU host, and its parts for people.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};
use gpufleet_collector::cli::RecordingArgs;
use gpufleet_collector::kernel_log;
use gpufleet_collector::publisher::{Pace, Publisher};
use gpufleet_collector::source::live::Live;
use gpufleet_collector::source::recording::Recording;
use gpufleet_runtime::exit::{Failure, finish, print};
use gpufleet_runtime::kafka::{self, BrokerArgs};
use gpufleet_runtime::logging::{self, LogFormat};
use gpufleet_runtime::progress::Progress;
use gpufleet_schemas::Topics;
use gpufleet_schemas::catalogue::advice;
use gpufleet_schemas::record::Labels;
use serde::Deserialize;
use serde_json::json;

#[derive(Parser)]
#[command(name = "gpufleet-collector", version, about = "Publishes what GPUs and kernels say", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[arg(long, global = true, value_enum, default_value_t)]
    log_format: LogFormat,
}

#[derive(Subcommand)]
enum Command {
    /// Watch this host: NVML and the kernel log
    Run {
        #[command(flatten)]
        broker: BrokerArgs,
        /// Labels of this host: host, site, row, rack, feeds
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// The kernel log
        #[arg(long, value_name = "PATH", default_value = "/dev/kmsg")]
        kmsg: PathBuf,
    },
    /// Publish nvidia-smi CSV logs and kernel logs
    Publish {
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
        #[command(flatten)]
        broker: BrokerArgs,
        #[command(flatten)]
        recording: RecordingArgs,
        /// Publish under a new identity files that were published before
        #[arg(long)]
        again: bool,
    },
    /// Print one JSON object for each event of a kernel log (- is stdin)
    Decode {
        #[arg(value_name = "FILE")]
        file: PathBuf,
        #[arg(long, value_enum, default_value_t)]
        format: DecodeFormat,
    },
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum DecodeFormat {
    #[default]
    Json,
}

fn open_publisher(broker: &BrokerArgs, clock: Option<&str>) -> Result<Publisher, Failure> {
    let topics = Topics::with_prefix(&broker.topic_prefix);
    let (_, layout) = kafka::connect(&broker.brokers, &[&topics.telemetry], broker.patience)?;
    kafka::require(&layout, &topics.telemetry, broker.partitions, &broker.brokers)?;
    Publisher::open(&broker.brokers, &topics.telemetry, broker.partitions, clock)
}

/// Where this host stands.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct HostConfig {
    host: Option<String>,
    site: Option<String>,
    row: Option<String>,
    rack: Option<String>,
    feeds: Vec<String>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    logging::start("info", cli.log_format);
    let result = match cli.command {
        Command::Run { broker, config, kmsg } => run(&broker, config.as_deref(), &kmsg),
        Command::Publish { files, broker, recording, again } => publish(&files, &broker, &recording, again),
        Command::Decode { file, format: DecodeFormat::Json } => decode(&file),
    };
    finish("gpufleet-collector", result)
}

fn run(broker: &BrokerArgs, config: Option<&Path>, kmsg: &Path) -> Result<(), Failure> {
    let config: HostConfig = config.map_or(Ok(HostConfig::default()), gpufleet_runtime::config::load)?;
    let labels =
        Labels { site: config.site, row: config.row, rack: config.rack, feeds: config.feeds, driver_version: None };
    let mut live = Live::open(labels, config.host, kmsg).map_err(Failure::from)?;
    let mut publisher = open_publisher(broker, None)?;
    let stop = Progress::new(0);
    stop.stop_on_signal()?;
    publisher.run(&mut live, &Pace::Unbound, &mut |_| !stop.stopping())
}

fn publish(files: &[PathBuf], broker: &BrokerArgs, recording: &RecordingArgs, again: bool) -> Result<(), Failure> {
    let mut recording = Recording::open(files, &recording.options(again)?).map_err(Failure::from)?;
    let mut publisher = open_publisher(broker, Some("recording"))?;
    let acknowledged = publisher.acknowledged();
    publisher.run(&mut recording, &Pace::Unbound, &mut |_| true)?;
    let mut text = format!("{} samples and {} events acknowledged\n", acknowledged.samples(), acknowledged.events());
    for lost in recording.summary().iter().flat_map(|file| &file.losses) {
        text += &format!("left out: {} {}: {}\n", lost.count, lost.reason, lost.detail.as_deref().unwrap_or_default());
    }
    print(&text)
}

fn decode(file: &Path) -> Result<(), Failure> {
    let unreadable = |error: std::io::Error| Failure::external(format!("cannot read {}: {error}", file.display()));
    let input: Box<dyn BufRead> = if file == Path::new("-") {
        Box::new(std::io::stdin().lock())
    } else {
        Box::new(BufReader::new(File::open(file).map_err(unreadable)?))
    };
    let mut problem = None;
    kernel_log::read(input, &kernel_log::Clock::default(), |decoded| {
        let event = &decoded.event;
        let object = json!({
            "kind": event.kind,
            "code": event.code,
            "pci": event.pci,
            "pid": event.pid,
            "process": event.process,
            "mig": event.mig,
            "message": event.message,
            "action": advice(event.kind, event.code, &event.message).ladder,
        });
        if problem.is_none() {
            problem = print(&format!("{object}\n")).err();
        }
    })
    .map_err(unreadable)?;
    problem.map_or(Ok(()), Err)
}
