//! What a code means, how bad it is and what to do: NVIDIA's catalogues as data, and the three kinds of message that
//! carry more than their code does (Xid 154, Xid 144-150, the severity that an `NVSwitch` prints).
//!
//! Takes a decoded event's kind, code and message; gives an [`Advice`]. The tables are `schemas/data/xid_catalogue.tsv`
//! and `schemas/data/sxid_catalogue.tsv`, embedded; a new edition of NVIDIA's catalogue is a new file, not new code. Not done:
//! rules that need more than one event (the same code twice, a sibling within seconds): those are a detector's.

pub mod nvlink5;
#[cfg(test)]
mod tests;

use std::sync::OnceLock;

use serde::Serialize;

use crate::record::{EventKind, Severity};
use nvlink5::Action;

/// What to tell a person about an event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Advice {
    /// NVIDIA's name, or `unclassified`.
    pub name: &'static str,
    pub severity: Severity,
    /// Names of actions: the immediate one first, then what to investigate.
    pub ladder: Vec<String>,
    /// Document that says so.
    pub source: &'static str,
}

/// One row of `data/xid_catalogue.tsv`.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    pub code: i32,
    pub name: &'static str,
    /// Letters of the architectures that print it: A A100, H H100, B B100, G GB200.
    pub generations: &'static str,
    /// Cause ticks as NVIDIA published them.
    pub class: &'static str,
    pub severity: Severity,
    immediate: &'static str,
    investigate: &'static str,
    /// A sibling Xid 154 is expected (drivers of CUDA 12.7 and later).
    pub expects_154: bool,
    pub note: &'static str,
    source: &'static str,
}

struct SxidEntry {
    code: i32,
    name: &'static str,
    /// `None`: the severity that the message prints decides.
    severity: Option<Severity>,
    immediate: &'static str,
    investigate: &'static str,
}

const XID_TABLE: &str = include_str!("../data/xid_catalogue.tsv");
const SXID_TABLE: &str = include_str!("../data/sxid_catalogue.tsv");
const WORKBOOK: &str = "NVIDIA Xid catalogue workbook";
const DRIVER_HEADER: &str = "NVIDIA driver header nverror.h 595.45.04";
const RECOVERY_ACTIONS: &str = "NVIDIA driver and NVML recovery actions";
const FABRIC_GUIDE: &str = "NVIDIA Fabric Manager guide";
/// NVIDIA's word where it has no other advice, and ours where NVIDIA gives none.
const ASK: &str = "CONTACT_SUPPORT";
const RESET_GPU: &str = "RESET_GPU";
const RESTART_MACHINE: &str = "RESTART_BM";
const IGNORE: &str = "IGNORE";

/// Advice for one event. A code that no catalogue has is `unclassified`, major, and never dropped. A GPU that fell off
/// the bus, or that NVML calls lost, is Xid 79 whatever the code.
#[must_use]
pub fn advice(kind: EventKind, code: Option<i32>, message: &str) -> Advice {
    match (kind, code) {
        (EventKind::FellOff | EventKind::GpuLost, _) => xid_advice(79),
        (EventKind::Sxid, Some(code)) => sxid_advice(code, message),
        (EventKind::Xid, Some(154)) => recovery_advice(message),
        (EventKind::Xid, Some(code @ 144..=150)) => nvlink5_advice(code, message),
        (EventKind::Xid, Some(code)) => xid_advice(code),
        (EventKind::Xid | EventKind::Sxid | EventKind::Unknown, _) => unclassified(),
    }
}

/// The catalogue's row of an Xid.
#[must_use]
pub fn xid(code: i32) -> Option<&'static Entry> {
    static TABLE: OnceLock<Vec<Entry>> = OnceLock::new();
    let table = TABLE.get_or_init(|| sorted(XID_TABLE, xid_row, |entry| entry.code));
    table.binary_search_by_key(&code, |entry| entry.code).ok().and_then(|at| table.get(at))
}

fn sxid(code: i32) -> Option<&'static SxidEntry> {
    static TABLE: OnceLock<Vec<SxidEntry>> = OnceLock::new();
    let table = TABLE.get_or_init(|| sorted(SXID_TABLE, sxid_row, |entry| entry.code));
    table.binary_search_by_key(&code, |entry| entry.code).ok().and_then(|at| table.get(at))
}

fn xid_advice(code: i32) -> Advice {
    let Some(entry) = xid(code) else { return unclassified() };
    Advice {
        name: entry.name,
        severity: entry.severity,
        ladder: ladder(entry.severity, &[entry.immediate, entry.investigate]),
        source: entry.source,
    }
}

fn unclassified() -> Advice {
    let source = "no catalogue has this code";
    Advice { name: "unclassified", severity: Severity::Major, ladder: vec![ASK.into()], source }
}

/// Xid 154 carries the action that the driver recommends after a sibling Xid: the number of `to 0xN`, never the words,
/// which change between drivers. It is information about that sibling, so never worse than information itself.
fn recovery_advice(message: &str) -> Advice {
    let advice = xid_advice(154);
    let actions: &[&str] = match recovery_action(message) {
        Some(0) => &["NONE"],
        Some(1 | 6) => &[RESET_GPU],
        Some(2 | 7) => &[RESTART_MACHINE],
        Some(3) => &["DRAIN_P2P"],
        Some(4) => &["DRAIN", RESET_GPU],
        Some(5) => &["RECOVER_IMEX_DOMAIN"],
        Some(_) => &[ASK],
        None => return advice,
    };
    Advice { ladder: ladder(advice.severity, actions), source: RECOVERY_ACTIONS, ..advice }
}

/// The number that Xid 154 changes to: 0 none, 1 GPU reset, 2 node reboot, 3 drain peers, 4 drain and reset, 5 recover
/// the IMEX domain, 6 bus reset, 7 system reboot (NVML 615). `None` where the line was cut before it.
#[must_use]
pub fn recovery_action(message: &str) -> Option<u32> {
    let (_, number) = message.rsplit_once(" to 0x")?;
    let digits = number.bytes().take_while(u8::is_ascii_hexdigit).count();
    hex(number.get(..digits)?)
}

fn nvlink5_advice(code: i32, message: &str) -> Advice {
    let base = xid_advice(code);
    let decoded = nvlink5::decode(code, message);
    let (severity, actions): (_, &[&str]) = match decoded.map_or(Action::Unclassified, |decoded| decoded.action()) {
        Action::ResetGpu => (Severity::Critical, &[RESET_GPU]),
        Action::Ignore => (Severity::Info, &[IGNORE]),
        Action::Xid154Eval => (Severity::Major, &["XID_154_EVAL", "RESTART_APP"]),
        Action::Unclassified if nvlink5::printed_fatal(message) == Some(true) => (Severity::Critical, &[ASK]),
        Action::Unclassified => (Severity::Major, &[ASK]),
    };
    Advice { severity, ladder: ladder(severity, actions), ..base }
}

fn sxid_advice(code: i32, message: &str) -> Advice {
    let printed = if message.starts_with("Fatal") {
        Some(Severity::Critical)
    } else if message.starts_with("Non-fatal") {
        Some(Severity::Warning)
    } else {
        None
    };
    let Some(entry) = sxid(code) else {
        let advice = unclassified();
        return Advice { severity: advice.severity.max(printed.unwrap_or(Severity::Major)), ..advice };
    };
    // A printed "fatal" outranks the guide; a printed "non-fatal" does not: the guide itself lists errors under that
    // heading which stall a GPU's links and end its jobs.
    let severity = match (entry.severity, printed) {
        (Some(listed), Some(printed)) if printed < Severity::Critical => listed,
        (Some(listed), None) => listed,
        (_, printed) => printed.unwrap_or(Severity::Major),
    };
    let contradicted = entry.severity.is_some_and(|listed| listed < severity);
    let actions = if contradicted { [ASK, ""] } else { [entry.immediate, entry.investigate] };
    Advice { name: entry.name, severity, ladder: ladder(severity, &actions), source: FABRIC_GUIDE }
}

/// Actions without blanks and repeats. Where NVIDIA names none, good news needs none and the rest is for support.
fn ladder(severity: Severity, actions: &[&str]) -> Vec<String> {
    let mut ladder: Vec<String> = Vec::with_capacity(actions.len());
    for action in actions {
        if !action.is_empty() && ladder.last().is_none_or(|last| last != action) {
            ladder.push((*action).to_owned());
        }
    }
    if ladder.is_empty() {
        ladder.push(if severity == Severity::Info { IGNORE } else { ASK }.to_owned());
    }
    ladder
}

/// The rows of an embedded table by code: `#` is a comment, the first other line the header.
fn sorted<T>(table: &'static str, row: fn(&[&'static str]) -> Option<T>, code: fn(&T) -> i32) -> Vec<T> {
    let rows = table.lines().filter(|line| !line.starts_with('#')).skip(1);
    let mut entries: Vec<T> = rows.filter_map(|line| row(&line.split('\t').collect::<Vec<_>>())).collect();
    entries.sort_by_key(code);
    entries
}

fn xid_row(cells: &[&'static str]) -> Option<Entry> {
    let &[code, name, generations, class, _, level, immediate, investigate, expects_154, note, source] = cells else {
        return None;
    };
    Some(Entry {
        code: code.parse().ok()?,
        name,
        generations,
        class,
        severity: severity(level)?,
        immediate,
        investigate,
        expects_154: expects_154 == "y",
        note,
        source: if source.contains('C') { WORKBOOK } else { DRIVER_HEADER },
    })
}

fn sxid_row(cells: &[&'static str]) -> Option<SxidEntry> {
    let &[code, name, _class, level, immediate, investigate, _note] = cells else { return None };
    let severity = if level == "printed" { None } else { Some(severity(level)?) };
    Some(SxidEntry { code: code.parse().ok()?, name, severity, immediate, investigate })
}

fn severity(level: &str) -> Option<Severity> {
    match level {
        "info" => Some(Severity::Info),
        "warning" => Some(Severity::Warning),
        "major" => Some(Severity::Major),
        "critical" => Some(Severity::Critical),
        _ => None,
    }
}

/// A hexadecimal number of up to eight digits, with no sign and no `0x`.
fn hex(text: &str) -> Option<u32> {
    let plain = (1..=8).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if plain { u32::from_str_radix(text, 16).ok() } else { None }
}
