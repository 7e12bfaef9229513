//! Event time of one partition: how far the log has come.
//!
//! The watermark is the newest instant that data or a tick has shown, less the disorder bound; it never goes back. A
//! record from further ahead than the partition's ticks, or than the instant at which the broker took it, moves
//! nothing, so that one host with a wrong clock closes nobody's window and delays nobody.

use serde::{Deserialize, Serialize};

/// How far ahead of its log a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ahead {
    /// Not at all.
    No,
    /// By more than `future_bound`: it counts in its own windows, which close when the log has come there.
    Bound,
    /// By more than `future_horizon`: its time means nothing, and no window waits for it.
    Horizon,
}

/// Watermark of one partition. Instants and spans are microseconds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Clock {
    newest: Option<i64>,
    /// The newest tick, and when the broker took it.
    tick: Option<(i64, Option<i64>)>,
    /// Records, and ticks, that came from the future.
    pub from_the_future: u64,
}

/// The spans that a clock judges by.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub disorder: i64,
    pub future: i64,
    pub horizon: i64,
}

impl Clock {
    pub fn new() -> Clock {
        Clock { newest: None, tick: None, from_the_future: 0 }
    }

    /// The latest that it can be when the broker takes a record at `appended_at`: since the last tick no more time has
    /// gone by than between the arrivals of both, however long there was no tick; none when nothing tells.
    pub fn known(&self, appended_at: Option<i64>) -> Option<i64> {
        let ticked = self.tick.map(|(tick, taken_at)| match (taken_at, appended_at) {
            (Some(taken_at), Some(appended_at)) => tick.saturating_add(appended_at.saturating_sub(taken_at).max(0)),
            _ => tick,
        });
        ticked.into_iter().chain(appended_at).min()
    }

    /// How far `at` lies ahead of what is known; counts it.
    pub fn ahead(&mut self, at: i64, appended_at: Option<i64>, bounds: Bounds) -> Ahead {
        let ahead = self.known(appended_at).map_or(0, |known| at.saturating_sub(known));
        if ahead <= bounds.future {
            return Ahead::No;
        }
        self.from_the_future += 1;
        if ahead <= bounds.horizon { Ahead::Bound } else { Ahead::Horizon }
    }

    /// A record of this event time was read, which the broker took at `appended_at`.
    pub fn data(&mut self, at: i64, appended_at: Option<i64>, bounds: Bounds) -> Ahead {
        let ahead = self.ahead(at, appended_at, bounds);
        if ahead == Ahead::No {
            self.newest = self.newest.max(Some(at));
        }
        ahead
    }

    /// The partition's time source says that it is `at`. One that is ahead of the broker has a wrong clock itself.
    pub fn tick(&mut self, at: i64, appended_at: Option<i64>, bounds: Bounds) {
        if appended_at.is_some_and(|appended_at| at > appended_at.saturating_add(bounds.future)) {
            self.from_the_future += 1;
            return;
        }
        if self.tick.is_none_or(|(tick, _)| at >= tick) {
            self.tick = Some((at, appended_at));
        }
        self.newest = self.newest.max(Some(at));
    }

    /// No record older than this is expected any more; none before the first record.
    pub fn watermark(&self, bounds: Bounds) -> Option<i64> {
        self.newest.map(|newest| newest.saturating_sub(bounds.disorder))
    }
}

impl Default for Clock {
    fn default() -> Clock {
        Clock::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds { disorder: 5, future: 2, horizon: 100 };

    #[test]
    fn the_watermark_follows_data_and_ticks_and_never_goes_back() {
        let mut clock = Clock::new();
        assert_eq!(clock.watermark(BOUNDS), None);
        clock.data(10, None, BOUNDS);
        assert_eq!(clock.watermark(BOUNDS), Some(5));
        clock.tick(20, None, BOUNDS);
        assert_eq!(clock.watermark(BOUNDS), Some(15));
        clock.data(3, None, BOUNDS);
        clock.tick(4, None, BOUNDS);
        assert_eq!(clock.watermark(BOUNDS), Some(15));
    }

    #[test]
    fn a_record_from_the_future_moves_no_watermark() {
        let mut clock = Clock::new();
        clock.tick(20, None, BOUNDS);
        assert_eq!(clock.data(22, None, BOUNDS), Ahead::No);
        assert_eq!(clock.data(30, None, BOUNDS), Ahead::Bound);
        assert_eq!(clock.data(86_400, None, BOUNDS), Ahead::Horizon);
        assert_eq!((clock.watermark(BOUNDS), clock.from_the_future), (Some(17), 2));
    }

    #[test]
    fn the_instant_of_arrival_bounds_a_record_too() {
        let mut clock = Clock::new();
        assert_eq!(clock.data(86_400, Some(20), BOUNDS), Ahead::Horizon, "before any tick");
        assert_eq!(clock.watermark(BOUNDS), None);
        clock.tick(1_000_000, Some(2_000_000), BOUNDS);
        assert_eq!(clock.data(86_400, Some(2_000_001), BOUNDS), Ahead::No, "a recording that is replayed late");
    }

    #[test]
    fn a_pause_of_the_ticks_makes_no_record_one_of_the_future() {
        let mut clock = Clock::new();
        clock.tick(1000, Some(1001), BOUNDS);
        assert_eq!(clock.data(4600, Some(4601), BOUNDS), Ahead::No, "nobody wrote ticks for an hour");
        assert_eq!(clock.data(9000, Some(4602), BOUNDS), Ahead::Horizon);
    }

    #[test]
    fn a_tick_from_the_future_is_no_time() {
        let mut clock = Clock::new();
        clock.tick(86_400, Some(20), BOUNDS);
        clock.tick(20, Some(20), BOUNDS);
        assert_eq!((clock.watermark(BOUNDS), clock.from_the_future), (Some(15), 1));
    }
}
