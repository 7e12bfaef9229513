//! A recorded log to its events: lines, transports, messages and time put together.
//!
//! Memory is bounded by one line, except that events are held until the end of a log whose stamps count from a boot of
//! unknown instant: only its last line tells when that was.

use std::io::{BufRead, Result};

pub use super::lines::MAX_LINE_BYTES;
use super::lines::{Line, Lines};
use super::message::LOST_AT_START;
use super::timeline::{Clock, Moment, Timeline};
use super::transport::{Record, Transport, drivers_own, strip};
use super::{Decoded, Event, Summary, parse_message};

/// Other lines that may come between the three of a split message.
const MAX_SPLIT_LINES: u64 = 8;

/// Decodes a recorded log and hands each event to `each`, in the order of the file (those that wait for the end of the
/// file, see above, last).
///
/// # Errors
/// Only those of `input`; no content is an error.
pub fn read(input: impl BufRead, clock: &Clock, each: impl FnMut(Decoded)) -> Result<Summary> {
    let mut lines = Lines::new(input)?;
    let mut reader = Reader {
        timeline: Timeline::new(clock),
        each,
        summary: Summary::default(),
        held: Vec::new(),
        split: None,
        user_speaks: false,
    };
    while let Some(line) = lines.next()? {
        reader.line(&line);
    }
    Ok(reader.finish())
}

/// Whether the start of a file (its first 64 KiB will do) is a kernel log rather than, say, the CSV of `nvidia-smi`:
/// some line is the driver's own, or most lines have a transport that is known.
#[must_use]
pub fn looks_like_kernel_log(head: &str) -> bool {
    let head = head.trim_start_matches('\u{feff}').replace('\0', "");
    let (mut lines, mut known) = (0, 0);
    for line in head.lines().filter(|line| !line.trim().is_empty()) {
        let record = strip(line);
        if drivers_own(&record.text) || line.starts_with("__CURSOR=") {
            return true;
        }
        lines += 1;
        known += u32::from(record.transport != Transport::Unknown);
    }
    known * 2 > lines
}

struct Reader<'c, F> {
    timeline: Timeline<'c>,
    each: F,
    summary: Summary,
    /// Events whose time is not known before the end, with where they lie.
    held: Vec<(Decoded, usize, i64)>,
    split: Option<Split>,
    /// The last line with a header was a program's: indented lines after it are its own too.
    user_speaks: bool,
}

/// The first line or lines of a message that `dmesg` and the journal print as three.
struct Split {
    text: String,
    found: Found,
    moment: Moment,
}

/// What is known of an event besides the event.
struct Found {
    host: Option<String>,
    boot_id: Option<String>,
    sequence: Option<u64>,
    raw: String,
    line: u64,
}

impl<F: FnMut(Decoded)> Reader<'_, F> {
    fn line(&mut self, line: &Line) {
        self.summary.lines += 1;
        self.summary.cut += u64::from(line.cut);
        self.summary.not_utf8 += u64::from(line.replaced);
        let mut record = strip(&line.text);
        let continues = line.text.starts_with([' ', '\t']) && record.stamp.is_none();
        if continues && self.user_speaks {
            record.transport = Transport::User;
        }
        self.user_speaks = record.transport == Transport::User;
        let moment = self.timeline.place(record.stamp);
        if let Some(event) = record.event() {
            let found = self.found(&record, &line.text);
            self.emit(event, found, moment);
        } else if quotes(&record) {
            self.summary.quoted += 1;
        } else if record.transport != Transport::User {
            self.join(&record, &line.text, moment);
        }
    }

    /// Collects the lines of a split message until they are one.
    fn join(&mut self, record: &Record<'_>, raw: &str, moment: Moment) {
        if record.text.starts_with(LOST_AT_START) {
            let found = self.found(record, raw);
            self.split = Some(Split { text: record.text.to_string(), found, moment });
            return;
        }
        let Some(mut split) = self.split.take() else { return };
        if self.summary.lines > split.found.line + MAX_SPLIT_LINES {
            return;
        }
        let body = record.text.strip_prefix("NVRM:").unwrap_or_default().trim_start();
        if ["(PCI ID", "installed in this system", "has fallen off", "fallen off"]
            .iter()
            .any(|part| body.starts_with(part))
        {
            split.text.push('\n');
            split.text.push_str(&record.text);
            split.found.raw.push('\n');
            split.found.raw.push_str(raw);
            if let Some(event) = parse_message(&split.text) {
                return self.emit(event, split.found, split.moment);
            }
        }
        self.split = Some(split);
    }

    fn found(&self, record: &Record<'_>, raw: &str) -> Found {
        Found {
            host: record.host.as_deref().map(str::to_owned),
            boot_id: record.boot_id.clone(),
            sequence: record.sequence,
            raw: raw.to_owned(),
            line: self.summary.lines,
        }
    }

    fn emit(&mut self, event: Event, found: Found, moment: Moment) {
        self.summary.events += 1;
        let Found { host, boot_id, sequence, raw, line } = found;
        let decoded = Decoded { event, at_micros: 0, estimated: true, host, boot_id, sequence, raw, line };
        match moment {
            Moment::At { at_micros, estimated } => (self.each)(Decoded { at_micros, estimated, ..decoded }),
            Moment::SinceBoot { boot, micros } => self.held.push((decoded, boot, micros)),
        }
    }

    fn finish(mut self) -> Summary {
        let boots = self.timeline.boots();
        for (decoded, boot, micros) in self.held {
            let boot_at = boots.get(boot).copied().unwrap_or(0);
            (self.each)(Decoded { at_micros: boot_at.saturating_add(micros), ..decoded });
        }
        self.summary
    }
}

/// Whether a line that is no event holds the text of one.
fn quotes(record: &Record<'_>) -> bool {
    let whole = |prefix: &str| {
        record.text.match_indices(prefix).any(|(at, _)| record.text.get(at..).and_then(parse_message).is_some())
    };
    whole("NVRM: Xid ") || whole("nvidia-nvswitch") || whole("NVRM: GPU ")
}
