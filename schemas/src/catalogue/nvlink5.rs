//! Xid 144-150, the errors of `NVLink` 5 (Blackwell), from their hexadecimal words to an action.
//!
//! Line: `[pid, name,] UNIT Fatal|Nonfatal XCn iN Link L (intrinfo status d0 d1 d2 d3 d4)`. The rules and the table are
//! those of NVIDIA's Xid catalogue workbook. Drivers before R575 pack `intrinfo` in one layout (V1), later ones in
//! another (V2); no row of the table fits both with different actions, so both are tried and the driver's version
//! is not needed. The unit's name changes with the layout as well and is kept, not matched: the numbers decide.
//!
//! Not done: names of the `d` words, which NVIDIA does not publish.

#[cfg(test)]
mod tests;

/// What the table asks for; ordered by how much it disturbs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Action {
    Ignore,
    /// Follow the Xid 154 that comes with it; without one, restart the application.
    Xid154Eval,
    /// No row for this status: NVIDIA has to say.
    Unclassified,
    ResetGpu,
}

/// Which driver packed `intrinfo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    V1,
    V2,
}

/// One decoded line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nvlink5<'a> {
    /// As printed.
    pub unit: &'a str,
    /// The driver printed `Fatal`. Where it and the table disagree, the worse holds ([`Nvlink5::action`]).
    pub fatal: bool,
    /// -1 where the error is not of one link.
    pub link: Option<i32>,
    pub intrinfo: u32,
    pub status: u32,
    /// `None` where the words fit no row.
    pub layout: Option<Layout>,
    /// Only of Xid 149, link down: bits 25:20.
    pub link_down_reason: Option<u32>,
    /// What the table alone says.
    pub listed: Action,
}

impl Nvlink5<'_> {
    /// The worse of the table's action and the printed severity: fatal is a reset, unless the table has no row.
    #[must_use]
    pub fn action(&self) -> Action {
        match self.listed {
            Action::Unclassified => Action::Unclassified,
            listed if self.fatal => listed.max(Action::ResetGpu),
            listed => listed,
        }
    }
}

/// Whether the driver printed `Fatal` (`true`) or `Nonfatal`; works on lines cut short of their words.
#[must_use]
pub fn printed_fatal(message: &str) -> Option<bool> {
    severity(message).map(|(_, fatal, _)| fatal)
}

/// Decodes the message of Xid 144-150; `None` for other codes and where severity, `intrinfo` or status is missing.
#[must_use]
pub fn decode(code: i32, message: &str) -> Option<Nvlink5<'_>> {
    if !(144..=150).contains(&code) {
        return None;
    }
    let (unit, fatal, rest) = severity(message)?;
    let (before, words) = rest.split_once('(')?;
    let mut words = words.split([' ', ')']).filter(|word| !word.is_empty());
    let (intrinfo, status) = (word(words.next()?)?, word(words.next()?)?);
    let link = before.split_once("Link").and_then(|(_, link)| link.trim().parse().ok());
    let fit = fit(code, intrinfo, status);
    Some(Nvlink5 {
        unit,
        fatal,
        link,
        intrinfo,
        status,
        layout: fit.map(|(layout, ..)| layout),
        link_down_reason: fit.and_then(|(_, row, _)| row.link_down().then(|| reason(intrinfo))),
        listed: fit.map_or(Action::Unclassified, |(.., action)| action),
    })
}

/// Where to look when a link went down, by reason (Xid 149, bits 25:20).
#[must_use]
pub fn link_down_meaning(reason: u32) -> &'static str {
    match reason {
        0 => "sympathetic: another error brought the link down",
        1 => "report if more than one a day",
        2 | 4 | 10 => "link signal",
        15 | 17 | 22 | 38 => "software or user",
        16 | 18 => "software, user or link signal",
        21 | 32..=37 => "peer device",
        40 => "host",
        42 | 43 => "link signal or cables",
        _ => "not published",
    }
}

/// The unit, whether it is fatal, and the text after that word.
fn severity(message: &str) -> Option<(&str, bool, &str)> {
    let (at, label, fatal) = [(" Fatal ", true), (" Nonfatal ", false)]
        .into_iter()
        .find_map(|(label, fatal)| message.find(label).map(|at| (at, label, fatal)))?;
    Some((message.get(..at)?.trim(), fatal, message.get(at + label.len()..)?))
}

fn word(text: &str) -> Option<u32> {
    super::hex(text.strip_prefix("0x")?)
}

fn reason(intrinfo: u32) -> u32 {
    intrinfo >> 20 & 0x3f
}

/// What decides between the statuses of a row.
enum Statuses {
    /// Any status is a reset: NVIDIA lists the unit as one that only follows others.
    Any,
    /// Any status; a link that software, user (38) or host (40) took down is left alone.
    LinkDown,
    Listed {
        reset: &'static [u32],
        eval: &'static [u32],
        ignore: &'static [u32],
    },
    /// A reset only if the driver promoted the error (V1 bit 10, V2 bit 7).
    Promoted {
        reset: &'static [u32],
        ignore: &'static [u32],
    },
}

/// One unit: its sub-code in either layout (V2 may split it in two pipes).
struct Row {
    code: i32,
    v1: u32,
    v2: (u32, u32),
    statuses: Statuses,
}

impl Row {
    fn link_down(&self) -> bool {
        matches!(self.statuses, Statuses::LinkDown)
    }

    fn layout(&self, intrinfo: u32) -> Option<Layout> {
        let code_bits = if self.code == 150 { 0 } else { self.code.unsigned_abs() - 143 };
        if intrinfo & 0x1f == code_bits && intrinfo >> 5 & 0x1f == self.v1 {
            return Some(Layout::V1);
        }
        (self.v2.0..=self.v2.1).contains(&(intrinfo & 0x7f)).then_some(Layout::V2)
    }

    fn action(&self, layout: Layout, intrinfo: u32, status: u32) -> Option<Action> {
        if !self.link_down() && reason(intrinfo) != 0 {
            return None;
        }
        let promoted = match layout {
            Layout::V1 => intrinfo >> 10 & 1 == 1,
            Layout::V2 => intrinfo >> 7 & 1 == 1,
        };
        match &self.statuses {
            Statuses::LinkDown if matches!(reason(intrinfo), 38 | 40) => Some(Action::Ignore),
            Statuses::Any | Statuses::LinkDown => Some(Action::ResetGpu),
            Statuses::Listed { reset, .. } if reset.contains(&status) => Some(Action::ResetGpu),
            Statuses::Listed { eval, .. } if eval.contains(&status) => Some(Action::Xid154Eval),
            Statuses::Promoted { reset, .. } if reset.contains(&status) => {
                Some(if promoted { Action::ResetGpu } else { Action::Ignore })
            }
            Statuses::Listed { ignore, .. } | Statuses::Promoted { ignore, .. } => {
                ignore.contains(&status).then_some(Action::Ignore)
            }
        }
    }
}

fn fit(code: i32, intrinfo: u32, status: u32) -> Option<(Layout, &'static Row, Action)> {
    ROWS.iter().filter(|row| row.code == code).find_map(|row| {
        let layout = row.layout(intrinfo)?;
        Some((layout, row, row.action(layout, intrinfo, status)?))
    })
}

/// A status that every unit's last bit stands for: nothing happened.
const NONE: u32 = 0x8000_0000;

const fn row(code: i32, v1: u32, v2: u32, statuses: Statuses) -> Row {
    Row { code, v1, v2: (v2, v2), statuses }
}

const fn listed(reset: &'static [u32], eval: &'static [u32], ignore: &'static [u32]) -> Statuses {
    Statuses::Listed { reset, eval, ignore }
}

const TLW: Statuses = listed(&[4], &[], &[1, 2, NONE]);

static ROWS: [Row; 17] = [
    // SAW_MVB
    row(144, 1, 1, listed(&[2, 0x10], &[], &[1, 4, 8, 0x20])),
    // RLW_CTRL, RLW_REMAP, RLW_RSPCOL, RLW_RXPIPE, RLW_SRC_TRACK, RLW_TAGSTATE
    row(145, 3, 3, listed(&[], &[], &[NONE])),
    row(145, 4, 4, listed(&[0x40, 0x80], &[1, 2, 4, 8, 0x10, 0x20], &[0x100, 0x200, NONE])),
    row(145, 5, 5, listed(&[2], &[], &[1, NONE])),
    row(145, 6, 6, Statuses::Promoted { reset: &[1, 2, 4], ignore: &[8, NONE] }),
    row(145, 7, 7, listed(&[1, 0x10, 0x20], &[4, 8], &[2, NONE])),
    row(145, 8, 8, listed(&[2, 0x2_0000, 0x10_0000], &[], &[1, 0x1_0000, NONE])),
    // TLW_CTRL, TLW_RX (pipes 0 and 1), TLW_TX (pipes 0 and 1)
    row(146, 9, 9, TLW),
    Row { code: 146, v1: 10, v2: (10, 11), statuses: TLW },
    Row { code: 146, v1: 11, v2: (12, 13), statuses: TLW },
    // TREX, NVLPW
    row(147, 12, 14, listed(&[], &[], &[1, NONE])),
    row(148, 0, 15, listed(&[], &[], &[NONE])),
    // NETIR_INT, NETIR_LINK_DOWN (LINK_EVT), NETIR_BER_EVENT, NETIR_MFDE_EVENT
    row(149, 0, 24, Statuses::Any),
    row(149, 14, 17, Statuses::LinkDown),
    row(149, 17, 19, listed(&[], &[], &[0, 1, 2, 3])),
    row(149, 18, 20, listed(&[1, 4, 5, 7], &[], &[3])),
    // MSE degraded or its watchdog
    row(150, 0, 0, listed(&[0, 0xffff_ffff], &[], &[])),
];
