//! One cell of an `nvidia-smi` CSV: absent, lost, or text that a column's form turns into an integer.
//!
//! Decimal numbers are never floats on the way, so 688.12 W is 688120 mW. A cell that is not understood is `None` to
//! the caller, who counts it; it never becomes 0.

use gpufleet_schemas::instant::{DAY, SECOND};
use time::{Date, Month};

/// What a cell says, before its column is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cell<'a> {
    /// The driver has no answer, in any of its wordings.
    Absent,
    /// The driver has lost the GPU.
    Lost,
    Text(&'a str),
}

/// Wordings of "no answer" outside brackets, lower case. Within brackets every text is one: that is how nvidia-smi
/// prints an NVML error.
const ABSENT: &[&str] = &[
    "",
    "-",
    "--",
    "n/a",
    "na",
    "nan",
    "none",
    "null",
    "err!",
    "not supported",
    "not available",
    "not found",
    "unknown",
    "unknown error",
    "no data",
    "insufficient permissions",
    "function not found",
    "gpu requires reset",
];
const LOST: &str = "gpu is lost";

impl<'a> Cell<'a> {
    pub(super) fn of(text: &'a str) -> Cell<'a> {
        let text = text.trim();
        let inside = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
        let bare = inside.unwrap_or(text).trim();
        if bare.get(..LOST.len()).is_some_and(|start| start.eq_ignore_ascii_case(LOST)) {
            return Cell::Lost;
        }
        let message = inside.is_some_and(|inside| !inside.contains(|c: char| c.is_ascii_digit()));
        if message || ABSENT.iter().any(|absent| bare.eq_ignore_ascii_case(absent)) {
            return Cell::Absent;
        }
        Cell::Text(text)
    }
}

/// How the cells of a column are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// To milliwatts.
    Power,
    /// To bytes.
    Memory,
    /// To megahertz.
    Clock,
    Percent,
    Celsius,
    Count,
    /// `Yes` and `No`, to 1 and 0.
    Flag,
    /// `P0` to `P15`.
    PState,
    /// Hexadecimal.
    Mask,
}

impl Form {
    /// The value of a cell, `unit` being that of the column's header.
    pub(super) fn parse(self, text: &str, unit: Option<&str>) -> Option<i64> {
        match self {
            Form::Flag => flag(text),
            Form::PState => {
                let digits = text.strip_prefix(['P', 'p']).unwrap_or(text);
                digits.parse::<u8>().ok().filter(|state| *state <= 15).map(i64::from)
            }
            Form::Mask => {
                let digits = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"))?;
                let plain = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
                u64::from_str_radix(digits, 16).ok().filter(|_| plain).and_then(|mask| i64::try_from(mask).ok())
            }
            _ => {
                let end = text.find(|c: char| !c.is_ascii_digit() && c != '.' && c != '-').unwrap_or(text.len());
                let (number, own) = text.split_at(end);
                let own = Some(own.trim()).filter(|own| !own.is_empty());
                self.integer(number, own.or(unit))
            }
        }
    }

    /// Micro-parts of the metric's unit in one `unit`; without one, the unit that nvidia-smi uses for the field.
    fn micro_scale(self, unit: Option<&str>) -> Option<u128> {
        const ONE: u128 = 1_000_000;
        Some(match (self, unit) {
            (Form::Power, None | Some("W")) => 1000 * ONE,
            (Form::Power, Some("mW")) => ONE,
            (Form::Power, Some("kW")) => 1_000_000 * ONE,
            // Drivers before the 330 series print binary units under their decimal names.
            (Form::Memory, None | Some("MiB" | "MB")) => ONE << 20,
            (Form::Memory, Some("KiB" | "kB" | "KB")) => ONE << 10,
            (Form::Memory, Some("GiB" | "GB")) => ONE << 30,
            (Form::Memory, Some("B" | "bytes")) => ONE,
            (Form::Clock, None | Some("MHz")) => ONE,
            (Form::Clock, Some("GHz")) => 1000 * ONE,
            (Form::Clock, Some("kHz")) => ONE / 1000,
            (Form::Percent, None | Some("%")) | (Form::Celsius, None | Some("C" | "°C")) | (Form::Count, None) => ONE,
            _ => return None,
        })
    }

    fn integer(self, number: &str, unit: Option<&str>) -> Option<i64> {
        const MAX_DIGITS: usize = 20;
        let scale = self.micro_scale(unit)?;
        let (negative, digits) = number.strip_prefix('-').map_or((false, number), |digits| (true, digits));
        let (whole, fraction) = digits.split_once('.').unwrap_or((digits, "0"));
        let plain = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        if !plain(whole) || !plain(fraction) || whole.len() + fraction.len() > MAX_DIGITS {
            return None;
        }
        let power = 10u128.pow(u32::try_from(fraction.len()).ok()?);
        let number = whole.parse::<u128>().ok()? * power + fraction.parse::<u128>().ok()?;
        let (scaled, one) = (number * scale, power * 1_000_000);
        // Half an error is none.
        if self == Form::Count && scaled % one != 0 {
            return None;
        }
        let rounded = i64::try_from((scaled + one / 2) / one).ok()?;
        match (self, negative) {
            (Form::Celsius, true) => Some(-rounded),
            (_, true) if rounded != 0 => None,
            _ => Some(rounded),
        }
    }
}

fn flag(text: &str) -> Option<i64> {
    match text.to_ascii_lowercase().as_str() {
        "yes" | "1" | "true" => Some(1),
        "no" | "0" | "false" => Some(0),
        _ => None,
    }
}

/// `Active` or `Not Active`.
pub(super) fn active(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "active" => Some(true),
        "not active" => Some(false),
        _ => None,
    }
}

/// A number that carries its unit, as opposed to a bare one.
pub(super) fn has_unit(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_digit())
        && [" W", " %", " MiB", " MHz"].iter().any(|unit| text.ends_with(unit))
}

pub(super) fn bare_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.')
}

/// Whether a cell that nothing follows, not even a line end, can be nothing but whole. `30` may be the start of
/// `300.00 W`; `300.00 W` is not the start of anything.
pub(super) fn whole(text: &str) -> bool {
    let two_decimals = bare_number(text) && text.rsplit_once('.').is_some_and(|(_, fraction)| fraction.len() == 2);
    let uuid = text.starts_with("GPU-") && text.len() == 40;
    let mask = text.starts_with("0x") && text.len() == 18;
    let word = ["N/A", "Active", "Not Active", "Yes"].contains(&text);
    has_unit(text) || two_decimals || uuid || mask || word || text.ends_with(']')
}

/// Microseconds UTC of `2026/03/02 09:00:00.112` or an ISO form of it. Local, by `tz_offset_seconds`, unless the text
/// has an offset of its own.
pub(super) fn timestamp(text: &str, tz_offset_seconds: i32) -> Option<i64> {
    let (date, rest) = text.split_at_checked(10)?;
    let separator = date.as_bytes().get(4).filter(|byte| matches!(byte, b'/' | b'-'))?;
    let mut parts = date.split(char::from(*separator));
    let (year, month, day) = (digits(parts.next()?, 4)?, digits(parts.next()?, 2)?, digits(parts.next()?, 2)?);
    let month = Month::try_from(u8::try_from(month).ok()?).ok()?;
    let date = Date::from_calendar_date(i32::try_from(year).ok()?, month, u8::try_from(day).ok()?).ok()?;
    let days = i64::from(date.to_julian_day()) - UNIX_EPOCH_JULIAN;
    let (clock, rest) = rest.strip_prefix(['T', ' '])?.split_at_checked(8)?;
    let mut parts = clock.split(':');
    let (hour, minute, second) = (digits(parts.next()?, 2)?, digits(parts.next()?, 2)?, digits(parts.next()?, 2)?);
    if parts.next().is_some() || hour > 23 || minute > 59 || second > 59 || days < 0 {
        return None;
    }
    let (micros, rest) = match rest.strip_prefix(['.', ',']) {
        Some(rest) => {
            let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
            let (fraction, rest) = rest.split_at(end);
            (digits(&format!("{fraction:0<6}")[..6], 6).filter(|_| !fraction.is_empty())?, rest)
        }
        None => (0, rest),
    };
    let offset = offset_seconds(rest.trim())?.unwrap_or(i64::from(tz_offset_seconds));
    Some(days * DAY + (hour * 3600 + minute * 60 + second - offset) * SECOND + micros)
}

/// Julian day of 1970-01-01.
const UNIX_EPOCH_JULIAN: i64 = 2_440_588;

/// The offset at the end of a stamp: `Some(None)` where there is none, `None` where it is something else.
fn offset_seconds(text: &str) -> Option<Option<i64>> {
    match text {
        "" => return Some(None),
        "Z" | "UTC" => return Some(Some(0)),
        _ => {}
    }
    let sign = if text.starts_with('-') { -1 } else { 1 };
    let (hours, minutes) = text.strip_prefix(['+', '-'])?.split_at_checked(2)?;
    let minutes = minutes.strip_prefix(':').unwrap_or(minutes);
    let minutes = if minutes.is_empty() { 0 } else { digits(minutes, 2)? };
    Some(Some(sign * (digits(hours, 2)? * 3600 + minutes * 60)))
}

fn digits(text: &str, count: usize) -> Option<i64> {
    let plain = text.len() == count && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| plain)
}
