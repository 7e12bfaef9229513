//! Time stamps at the start of a log line, read as they are written. Nothing is placed in UTC here unless the stamp
//! says its offset: that is [`super::Timeline`]'s work, which knows the time zone, the year and the boot.

use serde::{Deserialize, Serialize};
use time::{Date, Month};

use super::scan::{fraction_micros, number, word};

pub(super) const MICROS_PER_SECOND: i64 = 1_000_000;
const SECONDS_PER_DAY: i64 = 86_400;
const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
const WEEKDAYS: [&str; 7] = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];
/// Longest bracketed stamp that is looked at.
const MAX_BRACKET_BYTES: usize = 64;

/// What a line says of its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stamp {
    /// Since boot, by the clock that stops during suspend.
    Monotonic { micros: i64 },
    /// UTC, microseconds since 1970.
    Wall { at_micros: i64 },
    /// A local date and time, as microseconds since 1970-01-01 00:00 of the same clock.
    Local { local_micros: i64 },
    /// A local date and time that lacks its year.
    LocalNoYear { month: u8, day: u8, micros_of_day: i64 },
}

/// A stamp, the text after it, and whether its form is that of `dmesg`.
pub(super) struct Leading<'a> {
    /// `None` where the stamp was elided or says only the distance to the line before.
    pub(super) stamp: Option<Stamp>,
    pub(super) ring: bool,
    pub(super) rest: &'a str,
}

pub(super) fn leading(text: &str) -> Option<Leading<'_>> {
    if let Some((stamp, rest)) = bracket(text) {
        return Some(Leading { stamp, ring: true, rest });
    }
    let (stamp, rest) = iso(text).or_else(|| syslog(text)).or_else(|| full(text)).or_else(|| unix(text))?;
    // Something must part a stamp from the text; "2025-01-01x" is a word.
    let rest = if rest.is_empty() { rest } else { rest.strip_prefix(' ')?.trim_start() };
    Some(Leading { stamp: Some(stamp), ring: false, rest })
}

/// `dmesg`: `[  123.456]`, `[Sun Feb 23 16:24:18 2025]`, `[Aug12 01:22]`, `[  +0.000012]`, a pasted `[...]`; and the
/// `[ T123]` (caller) that may follow.
pub(super) fn bracket(text: &str) -> Option<(Option<Stamp>, &str)> {
    let (inside, rest) = text.strip_prefix('[')?.split_once(']')?;
    if inside.len() > MAX_BRACKET_BYTES {
        return None;
    }
    let inside = inside.trim();
    let stamp = if inside == "..." || distance(inside) {
        None
    } else {
        Some(since_boot(inside).or_else(|| ctime(inside)).or_else(|| relative_start(inside))?)
    };
    let rest = rest.trim_start();
    Some((stamp, caller(rest).unwrap_or(rest)))
}

fn distance(inside: &str) -> bool {
    let digits = inside.strip_prefix('+').or_else(|| inside.strip_prefix('<')?.strip_suffix('>')).map(str::trim);
    digits.is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.'))
}

fn caller(text: &str) -> Option<&str> {
    let (inside, rest) = text.strip_prefix('[')?.split_once(']')?;
    let (_, left) = number(inside.trim().strip_prefix(['T', 'C'])?, 1..=9)?;
    left.is_empty().then(|| rest.trim_start())
}

/// `123.456789`, or `123.456789 <    0.000001>` of `dmesg -d`.
fn since_boot(inside: &str) -> Option<Stamp> {
    let (seconds, rest) = number(inside, 1..=12)?;
    let (micros, rest) = fraction_micros(rest);
    let rest = rest.trim_start();
    (rest.is_empty() || distance(rest)).then_some(Stamp::Monotonic { micros: seconds * MICROS_PER_SECOND + micros })
}

/// `Sun Feb 23 16:24:18 2025`.
fn ctime(inside: &str) -> Option<Stamp> {
    let (weekday, rest) = word(inside);
    if !WEEKDAYS.contains(&weekday) {
        return None;
    }
    let (month, day, rest) = month_day(rest)?;
    let (of_day, rest) = time_of_day(rest)?;
    let (year, rest) = number(rest.trim_start(), 4..=4)?;
    let local_micros = date_micros(i32::try_from(year).ok()?, month, day)? + of_day;
    rest.is_empty().then_some(Stamp::Local { local_micros })
}

/// `Aug12 01:22`, where `dmesg -e` begins a minute.
fn relative_start(inside: &str) -> Option<Stamp> {
    let (month, day, rest) = month_day(inside)?;
    let (hour, rest) = number(rest, 2..=2)?;
    let (minute, rest) = number(rest.strip_prefix(':')?, 2..=2)?;
    let micros_of_day = clock_micros(hour, minute, 0)?;
    rest.is_empty().then_some(Stamp::LocalNoYear { month, day, micros_of_day })
}

/// `2025-01-25T10:34:54,859532+00:00`, with `T` or a space, any or no fraction, and `Z`, an offset or neither.
pub(super) fn iso(text: &str) -> Option<(Stamp, &str)> {
    let (year, rest) = number(text, 4..=4)?;
    let (month, rest) = number(rest.strip_prefix('-')?, 2..=2)?;
    let (day, rest) = number(rest.strip_prefix('-')?, 2..=2)?;
    let (of_day, rest) = time_of_day(rest.strip_prefix(['T', ' '])?)?;
    let date = date_micros(i32::try_from(year).ok()?, u8::try_from(month).ok()?, u8::try_from(day).ok()?)?;
    let local_micros = date + of_day;
    match offset_seconds(rest) {
        Some((offset, rest)) => Some((Stamp::Wall { at_micros: local_micros - offset * MICROS_PER_SECOND }, rest)),
        None => Some((Stamp::Local { local_micros }, rest)),
    }
}

fn offset_seconds(text: &str) -> Option<(i64, &str)> {
    if let Some(rest) = text.strip_prefix('Z') {
        return Some((0, rest));
    }
    let sign = if text.starts_with('-') { -1 } else { 1 };
    let (hours, rest) = text.strip_prefix(['+', '-'])?.split_at_checked(2)?;
    let (hours, _) = number(hours, 2..=2)?;
    let (minutes, rest) = number(rest.strip_prefix(':').unwrap_or(rest), 2..=2).unwrap_or((0, rest));
    Some((sign * (hours * 3600 + minutes * 60), rest))
}

/// `Aug 12 01:22:51`, with any or no fraction.
fn syslog(text: &str) -> Option<(Stamp, &str)> {
    let (month, day, rest) = month_day(text)?;
    let (micros_of_day, rest) = time_of_day(rest)?;
    Some((Stamp::LocalNoYear { month, day, micros_of_day }, rest))
}

/// `Sun 2025-02-23 16:24:18 UTC` of `journalctl -o short-full`; other zone names are taken for the file's own.
fn full(text: &str) -> Option<(Stamp, &str)> {
    let (weekday, rest) = word(text);
    if !WEEKDAYS.contains(&weekday) {
        return None;
    }
    let (stamp, after) = iso(rest)?;
    let (zone, _) = word(after.trim_start());
    let named = (2..=5).contains(&zone.len()) && zone.bytes().all(|byte| byte.is_ascii_uppercase());
    let rest = if named { after.trim_start().strip_prefix(zone)? } else { after };
    match stamp {
        Stamp::Local { local_micros } if zone == "UTC" => Some((Stamp::Wall { at_micros: local_micros }, rest)),
        _ => Some((stamp, rest)),
    }
}

/// `1700000000.123456` of `journalctl -o short-unix`.
fn unix(text: &str) -> Option<(Stamp, &str)> {
    let (seconds, rest) = number(text, 10..=10)?;
    let (micros, after) = fraction_micros(rest.starts_with('.').then_some(rest)?);
    Some((Stamp::Wall { at_micros: seconds * MICROS_PER_SECOND + micros }, after))
}

/// `Aug 12 `, `Aug  2 ` or `Aug12 `.
fn month_day(text: &str) -> Option<(u8, u8, &str)> {
    let name = text.get(..3)?;
    let month = MONTHS.iter().position(|month| *month == name)? + 1;
    let (day, rest) = number(text.get(3..)?.trim_start(), 1..=2)?;
    let day = u8::try_from(day).ok().filter(|day| (1..=31).contains(day))?;
    Some((u8::try_from(month).ok()?, day, rest.strip_prefix(' ')?))
}

/// `01:22:51[.123456]` as microseconds.
fn time_of_day(text: &str) -> Option<(i64, &str)> {
    let (hour, rest) = number(text, 2..=2)?;
    let (minute, rest) = number(rest.strip_prefix(':')?, 2..=2)?;
    let (second, rest) = number(rest.strip_prefix(':')?, 2..=2)?;
    let (micros, rest) = fraction_micros(rest);
    Some((clock_micros(hour, minute, second)? + micros, rest))
}

fn clock_micros(hour: i64, minute: i64, second: i64) -> Option<i64> {
    // A leap second is written as 60.
    let valid = hour < 24 && minute < 60 && second <= 60;
    valid.then_some((hour * 3600 + minute * 60 + second) * MICROS_PER_SECOND)
}

/// Midnight of a date as microseconds since 1970; `None` where there is no such date.
pub(super) fn date_micros(year: i32, month: u8, day: u8) -> Option<i64> {
    let date = Date::from_calendar_date(year, Month::try_from(month).ok()?, day).ok()?;
    let days = i64::from(date.to_julian_day()) - i64::from(Date::from_ordinal_date(1970, 1).ok()?.to_julian_day());
    Some(days * SECONDS_PER_DAY * MICROS_PER_SECOND)
}
