//! The text of one kernel message, transport prefixes gone, to an [`Event`].
//!
//! Formats are those of the driver's sources up to 595.45 and of logs up to the 610 series:
//!
//! ```text
//! NVRM: Xid (PCI:dddd:bb:dd[.f][ GPU-I:nn[ GPU-CI:nn]]): code[, pid=P][, name=COMM][, text]
//! nvidia-nvswitchN: SXid (PCI:dddd:bb:dd.f): code, text
//! NVRM: GPU dddd:bb:dd.f: GPU has fallen off the bus.
//! NVRM: The NVIDIA GPU dddd:bb:dd.f\nNVRM: (PCI ID: vvvv:dddd) installed in this system has\nNVRM: fallen off ...
//! ```
//!
//! Everything is anchored at the start of the text: that is what tells a report from a quotation of one.

use super::scan::{hex, number};
use super::{Event, EventKind, Mig};

/// How the first of the three lines begins that tell of a GPU lost while the driver starts.
pub(super) const LOST_AT_START: &str = "NVRM: The NVIDIA GPU ";
const FELL_OFF: &str = "fallen off the bus";
/// The driver's longest place, and its longest text around an address, are well under this.
const MAX_PLACE_BYTES: usize = 96;

/// Decodes one kernel message, or says that it is no report (another line of the driver, or not the driver's at all).
#[must_use]
pub fn parse_message(text: &str) -> Option<Event> {
    let text = text.trim();
    if let Some(rest) = text.strip_prefix("NVRM: Xid ") {
        xid(rest)
    } else if let Some(rest) = text.strip_prefix("nvidia-nvswitch") {
        sxid(rest)
    } else if let Some(rest) = text.strip_prefix("NVRM: GPU ") {
        fell_off(rest)
    } else if text.starts_with(LOST_AT_START) {
        lost_at_start(text)
    } else {
        None
    }
}

/// A PCI address in any of the spellings of driver and NVML, as `dddddddd:bb:dd` in lower case: with or without
/// `PCI:`, domain and function; the old `bbbb:dd` is bus and slot.
#[must_use]
pub fn pci_address(text: &str) -> Option<String> {
    let text = text.strip_prefix("PCI:").unwrap_or(text);
    let text = match text.rsplit_once('.') {
        Some((address, function)) => hex(function, 1..=1).map(|_| address)?,
        None => text,
    };
    let mut parts = text.split(':');
    let (first, second, third) = (parts.next()?, parts.next()?, parts.next());
    if parts.next().is_some() {
        return None;
    }
    let (domain, bus, device) = match third {
        Some(device) => (hex(first, 1..=8)?, hex(second, 1..=2)?, hex(device, 1..=2)?),
        None => (0, hex(first, 1..=4).filter(|bus| *bus <= 0xff)?, hex(second, 1..=2)?),
    };
    Some(format!("{domain:08x}:{bus:02x}:{device:02x}"))
}

fn xid(rest: &str) -> Option<Event> {
    let (place, rest) = place(rest)?;
    let (code, rest) = code(rest)?;
    let (pid, process, message) = task(rest);
    Some(Event {
        kind: EventKind::Xid,
        code: Some(code),
        pci: place.pci,
        pid,
        process: process.map(str::to_owned),
        mig: place.mig,
        message: message.to_owned(),
    })
}

fn sxid(rest: &str) -> Option<Event> {
    let (_, rest) = number(rest, 1..=4)?;
    let (place, rest) = place(rest.strip_prefix(": SXid ")?)?;
    let (code, message) = code(rest)?;
    opens_sxid(message).then(|| Event {
        kind: EventKind::Sxid,
        code: Some(code),
        pci: place.pci,
        pid: None,
        process: None,
        mig: None,
        message: message.to_owned(),
    })
}

/// An `NVSwitch` prints several lines per error, all with prefix and code; only the first is the error. A line cut
/// inside `Severity` or `Data` is still one of the others, and one with no text at all cannot be told from them.
fn opens_sxid(message: &str) -> bool {
    let detail = |label: &str| message.starts_with(label) || label.starts_with(message);
    let dump =
        start(message).split_once("data[").is_some_and(|(_, index)| index.starts_with(|c: char| c.is_ascii_digit()));
    !(detail("Severity ") || detail("Data {") || dump)
}

fn fell_off(rest: &str) -> Option<Event> {
    let (address, _) = start(rest).split_once(": GPU has fallen off the bus")?;
    let pci = pci_address(address.strip_prefix("at ").unwrap_or(address))?;
    let message = rest.get(address.len() + 2..)?;
    Some(lost(Some(pci), message.to_owned()))
}

fn lost_at_start(text: &str) -> Option<Event> {
    let unwrapped = text.lines().map(|line| line.trim().strip_prefix("NVRM:").unwrap_or(line).trim());
    let joined = unwrapped.collect::<Vec<_>>().join(" ");
    let (address, message) = joined.strip_prefix("The NVIDIA GPU ")?.split_once(' ')?;
    message.contains(FELL_OFF).then(|| lost(pci_address(address), message.to_owned()))
}

fn lost(pci: Option<String>, message: String) -> Event {
    Event { kind: EventKind::FellOff, code: None, pci, pid: None, process: None, mig: None, message }
}

/// As much of a text as a place may take: what is searched stays short, however long the line.
fn start(text: &str) -> &str {
    text.get(..text.floor_char_boundary(MAX_PLACE_BYTES)).unwrap_or(text)
}

struct Place {
    pci: Option<String>,
    mig: Option<Mig>,
}

/// `(PCI:...[ GPU-I:nn[ GPU-CI:nn]]):`. An unreadable address (people elide it) loses the address, not the event.
fn place(text: &str) -> Option<(Place, &str)> {
    let text = text.trim_start().strip_prefix('(')?;
    let (inside, _) = start(text).split_once(')')?;
    let rest = text.get(inside.len()..)?.strip_prefix("):")?;
    let mut words = inside.split_whitespace();
    let pci = words.next().and_then(pci_address);
    let instance = |word: Option<&str>, label: &str| word?.strip_prefix(label)?.parse().ok();
    let mig = instance(words.next(), "GPU-I:")
        .map(|gpu_instance| Mig { gpu_instance, compute_instance: instance(words.next(), "GPU-CI:") });
    Some((Place { pci, mig }, rest))
}

/// The code and the text after its comma.
fn code(text: &str) -> Option<(i32, &str)> {
    let (code, rest) = number(text.trim_start(), 1..=9)?;
    if rest.starts_with(|c: char| c.is_alphanumeric() || c == '_') {
        return None;
    }
    Some((i32::try_from(code).ok()?, rest.strip_prefix(',').unwrap_or(rest).trim_start()))
}

/// `[pid=P, ][name=COMM, ]message`. A name may hold spaces, colons, brackets and commas: only comma and space end it.
fn task(text: &str) -> (Option<i64>, Option<&str>, &str) {
    let (mut pid, mut rest) = (None, text);
    if let Some(value) = rest.strip_prefix("pid=") {
        let end = value.find([',', ' ']).unwrap_or(value.len());
        let (value, after) = value.split_at(end);
        pid = known(value).and_then(|value| value.parse().ok());
        rest = after.strip_prefix(',').unwrap_or(after).trim_start();
    }
    let Some(value) = rest.strip_prefix("name=") else { return (pid, None, rest) };
    let (name, message) = value.split_once(", ").unwrap_or((value.trim_end_matches(','), ""));
    (pid, known(name), message.trim_start())
}

/// A value, unless the driver or whoever pasted the line says that it is not known.
fn known(value: &str) -> Option<&str> {
    let bare = value.trim_matches(['\'', '"', '`', ' ']);
    let unknown = ["", "<unknown>", "unknown", "N/A", "n/a"].contains(&bare);
    (!unknown).then_some(bare)
}
