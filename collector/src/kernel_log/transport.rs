//! What carried a kernel message, taken off: `/dev/kmsg`, `dmesg` in its forms, `journalctl` in its forms, syslog.
//!
//! Takes one line (or one `/dev/kmsg` record); gives the message and what the transport knew. It does not judge the
//! message, except that the driver's own first words settle where a syslog header without a program name ends.

use std::borrow::Cow;

use super::scan::{number, word};
use super::stamp::{self, Stamp};
use super::{journal, message};

/// Who wrote a line, as far as its transport tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    Kernel,
    /// Another facility, or another program's name: whatever it says of Xids is hearsay.
    User,
    Unknown,
}

/// One line with its transport taken off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// The message, escapes of `/dev/kmsg` decoded.
    pub text: Cow<'a, str>,
    pub transport: Transport,
    pub stamp: Option<Stamp>,
    pub host: Option<Cow<'a, str>>,
    /// Sequence number of the kernel's ring buffer.
    pub sequence: Option<u64>,
    pub boot_id: Option<String>,
}

impl<'a> Record<'a> {
    pub(super) fn bare(text: impl Into<Cow<'a, str>>) -> Self {
        let text = text.into();
        Self { text, transport: Transport::Unknown, stamp: None, host: None, sequence: None, boot_id: None }
    }

    /// The event of this line, if the kernel (or nobody in particular) wrote it.
    #[must_use]
    pub fn event(&self) -> Option<super::Event> {
        if self.transport == Transport::User { None } else { message::parse_message(&self.text) }
    }

    /// One sign of user space outweighs all signs of the kernel: those can be forged.
    fn claim(&mut self, transport: Transport) {
        if self.transport != Transport::User && transport != Transport::Unknown {
            self.transport = transport;
        }
    }
}

/// Takes the transport off one line. Never fails: a line of no known form is all text.
#[must_use]
pub fn strip(line: &str) -> Record<'_> {
    let line = line.trim_matches(|c: char| c.is_whitespace() || c == '\0');
    if line.starts_with('{') {
        return journal::json(line).unwrap_or_else(|| Record::bare(line));
    }
    if let Some(text) = line.strip_prefix("MESSAGE=") {
        return Record::bare(text);
    }
    kmsg(line).unwrap_or_else(|| printed(line))
}

/// `priority,sequence,microseconds,flags[,more];text` and lines of `KEY=value` after it (kernel: ABI/testing/dev-kmsg).
fn kmsg(line: &str) -> Option<Record<'_>> {
    let (priority, rest) = number(line, 1..=10)?;
    let (sequence, rest) = number(rest.strip_prefix(',')?, 1..=18)?;
    let (micros, rest) = number(rest.strip_prefix(',')?, 1..=18)?;
    let (_flags, text) = rest.strip_prefix(',')?.split_once(';')?;
    let text = text.split_once("\n ").map_or(text, |(text, _keys)| text);
    Some(Record {
        text: unescape(text),
        transport: of_priority(priority),
        stamp: Some(Stamp::Monotonic { micros }),
        sequence: u64::try_from(sequence).ok(),
        ..Record::bare("")
    })
}

/// Facility is all but the low three bits; 0 is the kernel, and the kernel lets nobody else use it.
fn of_priority(priority: i64) -> Transport {
    if priority >> 3 == 0 { Transport::Kernel } else { Transport::User }
}

/// `/dev/kmsg` writes what is not printable, and the backslash, as `\x` and two digits.
fn unescape(text: &str) -> Cow<'_, str> {
    if !text.contains("\\x") {
        return Cow::Borrowed(text);
    }
    let mut bytes = Vec::with_capacity(text.len());
    let mut parts = text.split("\\x");
    bytes.extend_from_slice(parts.next().unwrap_or_default().as_bytes());
    for part in parts {
        let digits = part.get(..2).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
        if let Some(byte) = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            bytes.push(byte);
            bytes.extend_from_slice(&part.as_bytes()[2..]);
        } else {
            bytes.extend_from_slice(b"\\x");
            bytes.extend_from_slice(part.as_bytes());
        }
    }
    Cow::Owned(String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

/// All that `dmesg`, `journalctl -o short*` and syslog put before a message: each part may be there or not.
fn printed(line: &str) -> Record<'_> {
    let mut record = Record::bare("");
    let mut rest = line;
    let mut headed = false;
    if let Some((priority, after)) = syslog_priority(rest) {
        record.claim(of_priority(priority));
        (rest, headed) = (after, true);
    }
    if let Some((transport, after)) = dmesg_names(rest) {
        record.claim(transport);
        rest = after;
    }
    if let Some(after) = rfc5424(rest, &mut record) {
        rest = after;
    } else if let Some(leading) = stamp::leading(rest) {
        record.stamp = leading.stamp;
        rest = leading.rest;
        if leading.ring {
            record.claim(Transport::Kernel);
        }
        rest = header(rest, !leading.ring, &mut record);
    } else {
        rest = header(rest, headed, &mut record);
    }
    // The kernel's own stamp, inside what syslog wrote: less exact than a date, better than none.
    if let Some((inner, after)) = stamp::bracket(rest).filter(|_| record.transport != Transport::User) {
        record.stamp = record.stamp.or(inner);
        rest = after;
    }
    record.text = Cow::Borrowed(rest);
    record
}

/// `<3>`.
fn syslog_priority(text: &str) -> Option<(i64, &str)> {
    let (priority, rest) = number(text.strip_prefix('<')?, 1..=3)?;
    Some((priority, rest.strip_prefix('>')?.trim_start()))
}

/// `kern  :err   : ` of `dmesg -x`.
fn dmesg_names(text: &str) -> Option<(Transport, &str)> {
    const LEVELS: [&str; 8] = ["emerg", "alert", "crit", "err", "warn", "notice", "info", "debug"];
    let (facility, rest) = text.split_once(':')?;
    let (level, rest) = rest.split_once(':')?;
    let facility = facility.trim_end();
    let named = facility.len() <= 8 && facility.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    if !named || !LEVELS.contains(&level.trim()) {
        return None;
    }
    let transport = if facility == "kern" { Transport::Kernel } else { Transport::User };
    Some((transport, rest.trim_start()))
}

/// `1 2025-01-25T10:34:54.859Z host kernel - - - text` (RFC 5424 section 6).
fn rfc5424<'a>(text: &'a str, record: &mut Record<'a>) -> Option<&'a str> {
    let (version, rest) = word(text);
    let (time, rest) = word(rest);
    let stamp = stamp::iso(time).filter(|(_, after)| after.is_empty()).map(|(stamp, _)| stamp);
    if version != "1" || (stamp.is_none() && time != "-") {
        return None;
    }
    let (host, rest) = word(rest);
    let (program, rest) = word(rest);
    let (_process_id, rest) = word(rest);
    let (_message_id, rest) = word(rest);
    let text = structured_data(rest)?;
    record.stamp = stamp;
    record.host = (host != "-").then_some(Cow::Borrowed(host));
    record.claim(match program {
        "kernel" => Transport::Kernel,
        "-" => Transport::Unknown,
        _ => Transport::User,
    });
    let text = text.trim_start();
    Some(text.strip_prefix('\u{feff}').unwrap_or(text))
}

/// `-`, or `[id name="value"...]` once or more; in a value, a backslash protects the next character.
fn structured_data(text: &str) -> Option<&str> {
    if let Some(rest) = text.strip_prefix('-') {
        return Some(rest);
    }
    let mut rest = text;
    while rest.starts_with('[') {
        let (mut quoted, mut escaped) = (false, false);
        let end = rest.find(|c| {
            let plain = !escaped;
            escaped = plain && quoted && c == '\\';
            quoted ^= plain && c == '"';
            plain && !quoted && c == ']'
        })?;
        rest = rest.get(end + 1..)?;
    }
    (rest.len() < text.len()).then_some(rest)
}

/// `host program[pid]: ` after a syslog stamp or priority (`headed`); elsewhere only `kernel: ` or `host kernel: `,
/// since there any other two words may be the message itself.
fn header<'a>(text: &'a str, headed: bool, record: &mut Record<'a>) -> &'a str {
    if drivers_own(text) {
        return text;
    }
    if let Some(rest) = text.strip_prefix("kernel:") {
        record.claim(Transport::Kernel);
        return rest.trim_start();
    }
    let (first, tail) = word(text);
    let stamped = headed || record.stamp.is_some();
    if let Some(rest) = tail.strip_prefix("kernel:").filter(|_| stamped) {
        record.claim(Transport::Kernel);
        record.host = Some(Cow::Borrowed(first));
        return rest.trim_start();
    }
    if !headed {
        return text;
    }
    if first.ends_with(':') {
        record.claim(Transport::User);
        return tail;
    }
    if drivers_own(tail) {
        record.host = Some(Cow::Borrowed(first));
        return tail;
    }
    let (program, rest) = word(tail);
    if program.ends_with(':') {
        record.claim(Transport::User);
        record.host = Some(Cow::Borrowed(first));
        return rest;
    }
    text
}

pub(super) fn drivers_own(text: &str) -> bool {
    text.starts_with("NVRM:") || text.starts_with("nvidia-nvswitch")
}
