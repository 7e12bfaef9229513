//! NVIDIA's error reports in a host's kernel log: found, decoded, placed in time and judged.
//!
//! Takes a live `/dev/kmsg` record ([`strip`] then [`Record::event`]) or a recorded log of any common form ([`read`]);
//! gives an [`Event`] per Xid, `SXid` or GPU that fell off the bus. [`catalogue`] says what it means and what to do.
//!
//! Deliberately absent: no files are opened and no clock is read here, so a recording always gives the same events; no
//! duplicates are merged (that is a detector's work); nothing but the driver's own record opens an event, so a program
//! that quotes an Xid in its log does not. Fields of a `journalctl -o export` entry but `MESSAGE` are not used.

mod journal;
mod lines;
mod message;
mod reader;
mod scan;
mod stamp;
#[cfg(test)]
mod tests;
mod timeline;
mod transport;

use gpufleet_schemas::record::EventKind;
use serde::Serialize;

pub use message::{parse_message, pci_address};
pub use reader::{MAX_LINE_BYTES, looks_like_kernel_log, read};
pub use stamp::Stamp;
pub use timeline::{Clock, Moment, Timeline};
pub use transport::{Record, Transport, strip};

/// The MIG slice that an Xid names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Mig {
    pub gpu_instance: i32,
    pub compute_instance: Option<i32>,
}

/// One report of the driver. What the driver calls `<unknown>` is `None`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Event {
    pub kind: EventKind,
    /// `None` only for [`EventKind::FellOff`].
    pub code: Option<i32>,
    /// `dddddddd:bb:dd`, lower case, without function.
    pub pci: Option<String>,
    pub pid: Option<i64>,
    /// The kernel's name of the task, at most 15 bytes of anything.
    pub process: Option<String>,
    pub mig: Option<Mig>,
    /// What follows the code, process id and name; white space at both ends is cut.
    pub message: String,
}

/// An event of a recorded log, placed in time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Decoded {
    pub event: Event,
    /// Microseconds since 1970, UTC.
    pub at_micros: i64,
    /// The instant was worked out, not read: see [`Clock`].
    pub estimated: bool,
    pub host: Option<String>,
    pub boot_id: Option<String>,
    /// Sequence number of the kernel's ring buffer, where the log carries it.
    pub sequence: Option<u64>,
    /// The whole line as it was read; the lines of a split message are joined with newlines.
    pub raw: String,
    /// Number of the (first) line, from 1.
    pub line: u64,
}

/// What [`read`] saw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Summary {
    pub lines: u64,
    pub events: u64,
    /// Lines in which something other than the kernel quotes a report; ignored.
    pub quoted: u64,
    /// Lines longer than [`MAX_LINE_BYTES`]; the rest of each was skipped.
    pub cut: u64,
    /// Lines with bytes that are not text in the file's encoding; replaced.
    pub not_utf8: u64,
}
