//! What the program says about itself: on stderr, one line an event, as text or JSON.

use std::io::IsTerminal;

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}

/// Starts logging at `level` (`GPUFLEET_LOG` overrides it with a filter such as `info,rdkafka=debug`).
pub fn start(level: &str, format: LogFormat) {
    // The Delta kernel calls it an error that a table is not there before it is created.
    let quiet = "buoyant_kernel=off,delta_kernel=off,buoyant_kernel_engine=off,deltalake_core=error";
    let filter = std::env::var("GPUFLEET_LOG").unwrap_or_else(|_| format!("{level},{quiet}"));
    let builder = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_env_filter(tracing_subscriber::EnvFilter::new(filter));
    // A second start, as tests do, is no error.
    let _ = match format {
        LogFormat::Text => builder.with_target(false).try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
}
