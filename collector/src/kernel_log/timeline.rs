//! Where the lines of one log lie in UTC.
//!
//! Takes the stamps in the order of the file and what is known of the machine ([`Clock`]); gives an instant, or, for
//! stamps that count from a boot whose instant is not known, a [`Moment::SinceBoot`] that [`Timeline::boots`] resolves
//! once the whole file was seen.

use super::Stamp;
use super::stamp::{MICROS_PER_SECOND, date_micros};

const DAY_MICROS: i64 = 86_400 * MICROS_PER_SECOND;
/// The kernel's stamps may step back a little between processors; a larger step is another boot.
const REBOOT_MICROS: i64 = MICROS_PER_SECOND;

/// What the file itself does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Clock {
    /// Local time minus UTC.
    pub tz_offset_seconds: i32,
    /// Year of the first stamp that has none.
    pub year: i32,
    /// When the last line was written (of a file, its time of change): anchors stamps that count from boot.
    pub ends_at_micros: Option<i64>,
    /// When the machine booted; makes the anchor unnecessary.
    pub boot_at_micros: Option<i64>,
}

impl Clock {
    fn utc(&self, local_micros: i64) -> i64 {
        local_micros.saturating_sub(i64::from(self.tz_offset_seconds) * MICROS_PER_SECOND)
    }
}

/// Where a line lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    At {
        at_micros: i64,
        estimated: bool,
    },
    /// So long after the start of the file's boot number `boot`, from 0.
    SinceBoot {
        boot: usize,
        micros: i64,
    },
}

/// Places the lines of one log, which must come in the file's order.
#[derive(Debug)]
pub struct Timeline<'c> {
    clock: &'c Clock,
    year: i32,
    /// The latest stamp without a year: its month, and its place within `year`.
    latest: Option<(u8, i64)>,
    /// The last stamp of each boot whose instant is not known.
    boot_ends: Vec<i64>,
    previous: Option<Moment>,
}

impl<'c> Timeline<'c> {
    #[must_use]
    pub fn new(clock: &'c Clock) -> Self {
        Self { clock, year: clock.year, latest: None, boot_ends: Vec::new(), previous: None }
    }

    /// Places the next line. A line without a stamp takes the time of the line before it; with none before it, the end
    /// of the file.
    pub fn place(&mut self, stamp: Option<Stamp>) -> Moment {
        let Some(stamp) = stamp else { return self.repeat() };
        let exact = |at_micros| Moment::At { at_micros, estimated: false };
        let moment = match stamp {
            Stamp::Wall { at_micros } => exact(at_micros),
            Stamp::Local { local_micros } => exact(self.clock.utc(local_micros)),
            Stamp::LocalNoYear { month, day, micros_of_day } => exact(self.dated(month, day, micros_of_day)),
            Stamp::Monotonic { micros } => match self.clock.boot_at_micros {
                Some(boot_at) => exact(boot_at.saturating_add(micros)),
                None => self.since_boot(micros),
            },
        };
        self.previous = Some(moment);
        moment
    }

    /// When each boot began. The last stamp of the file falls on its end; an earlier boot ended, as far as anyone can
    /// tell, where the next began. With no known end the last boot began in 1970, which keeps at least the distances.
    #[must_use]
    pub fn boots(&self) -> Vec<i64> {
        let mut end = self.clock.ends_at_micros.or(self.boot_ends.last().copied()).unwrap_or(0);
        let mut boots: Vec<i64> = self
            .boot_ends
            .iter()
            .rev()
            .map(|last| {
                end = end.saturating_sub(*last);
                end
            })
            .collect();
        boots.reverse();
        boots
    }

    fn repeat(&self) -> Moment {
        match self.previous {
            Some(Moment::At { at_micros, .. }) => Moment::At { at_micros, estimated: true },
            Some(moment) => moment,
            None => Moment::At { at_micros: self.clock.ends_at_micros.unwrap_or(0), estimated: true },
        }
    }

    fn since_boot(&mut self, micros: i64) -> Moment {
        match self.boot_ends.last_mut() {
            Some(last) if micros >= last.saturating_sub(REBOOT_MICROS) => *last = micros.max(*last),
            _ => self.boot_ends.push(micros),
        }
        Moment::SinceBoot { boot: self.boot_ends.len() - 1, micros }
    }

    /// A file is written in order, so a month that goes back is the next year's, unless it is the straggler of a few
    /// hours that a merge of two sources leaves at a month's end.
    fn dated(&mut self, month: u8, day: u8, micros_of_day: i64) -> i64 {
        let mut local = in_year(self.year, month, day).saturating_add(micros_of_day);
        if let Some((latest_month, latest)) = self.latest {
            if month < latest_month && local < latest - DAY_MICROS {
                self.year = self.year.saturating_add(1);
                local = in_year(self.year, month, day).saturating_add(micros_of_day);
            } else if self.year > self.clock.year && month > latest_month {
                let before = in_year(self.year - 1, month, day).saturating_add(micros_of_day);
                if before > latest - DAY_MICROS {
                    return self.clock.utc(before);
                }
            }
        }
        if self.latest.is_none_or(|(_, latest)| local > latest) {
            self.latest = Some((month, local));
        }
        self.clock.utc(local)
    }
}

/// 29 February of a year that has none is a wrong `year`: the nearest day keeps the event.
fn in_year(year: i32, month: u8, day: u8) -> i64 {
    (28..=day.max(28)).rev().find_map(|last| date_micros(year, month, day.min(last))).unwrap_or(0)
}
