//! Where records come from.
//!
//! A [`Source`] gives records in the order of their time, complete but for what only the publisher knows. Files are
//! [`recording`], which reads [`nvidia_smi`] and [`kernel_log_file`]. A source decides nothing about health and
//! publishes nothing.

pub mod kernel_log_file;
pub mod live;
pub mod nvidia_smi;
pub mod nvml;
pub mod recording;

use std::fmt::Display;
use std::path::PathBuf;

use gpufleet_runtime::exit::{Failure, Fault};
use gpufleet_schemas::record::{Lost, LostReason, Telemetry};

/// Where records come from, in the order of their time.
pub trait Source {
    /// The next record, or `None` when there will be no more.
    fn next(&mut self) -> Result<Option<Telemetry>, SourceError>;
}

/// Why a source cannot go on. None of these heals by a retry.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    #[error("cannot read {name}: {message}; check that it is a file and that you may read it")]
    Unreadable { name: String, message: String },
    #[error(
        "{name} has no header line (`noheader`), so its columns have no names; put the line that names them at its \
         top, as `nvidia-smi --format=csv` prints it, such as `timestamp, index, power.draw [W]`"
    )]
    NoHeader { name: String },
    #[error(
        "{name} is neither an nvidia-smi CSV log (its header line names the columns, such as `timestamp, index, \
         power.draw [W]`) nor a kernel log (lines of dmesg, syslog or journalctl); unpack it if it is packed, add the \
         header if it lacks one, or leave it out"
    )]
    UnknownContent { name: String },
    #[error(
        "{} and {} have the same content and host {host}; give one of them, or import them with different hosts",
        first.display(),
        second.display()
    )]
    SameContent { first: PathBuf, second: PathBuf, host: String },
    #[error("cannot use NVML: {0}")]
    NoNvml(String),
}

impl SourceError {
    /// `what` (a file, a device) could not be read.
    pub fn unreadable(what: impl Display, error: &std::io::Error) -> SourceError {
        SourceError::Unreadable { name: what.to_string(), message: error.to_string() }
    }

    pub fn fault(&self) -> Fault {
        match self {
            SourceError::NoHeader { .. } | SourceError::UnknownContent { .. } | SourceError::SameContent { .. } => {
                Fault::Config
            }
            SourceError::Unreadable { .. } | SourceError::NoNvml(_) => Fault::External,
        }
    }
}

impl From<SourceError> for Failure {
    fn from(error: SourceError) -> Failure {
        Failure::new(error.fault(), error.to_string())
    }
}

/// What was left out, by reason, with the first of each named.
#[derive(Clone, Debug, Default)]
pub(crate) struct Losses(Vec<Lost>);

impl Losses {
    /// Counts `count` more. `detail` is asked only for the first of a reason.
    pub(crate) fn add(&mut self, reason: LostReason, count: u64, detail: impl FnOnce() -> String) {
        if count == 0 {
            return;
        }
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        match self.0.iter_mut().find(|lost| lost.reason == reason) {
            Some(lost) => lost.count = lost.count.saturating_add(count),
            None => self.0.push(Lost { reason, count, detail: Some(detail()) }),
        }
    }

    /// Counts what another one counted.
    pub(crate) fn merge(&mut self, others: &[Lost]) {
        for lost in others {
            let count = u64::try_from(lost.count).unwrap_or(0);
            self.add(lost.reason, count, || lost.detail.clone().unwrap_or_default());
        }
    }

    /// What was lost since the last call.
    pub(crate) fn take(&mut self) -> Vec<Lost> {
        std::mem::take(&mut self.0)
    }

    pub(crate) fn as_slice(&self) -> &[Lost] {
        &self.0
    }
}
