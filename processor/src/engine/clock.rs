//! Event time of one partition: how far the log has come.
//!
//! The watermark is the newest instant that data or a tick has shown, less the disorder bound; it never goes back.
//! Once ticks are there, a record from further ahead than a tick plus `future_bound` moves nothing, so that one host
//! with a wrong clock closes nobody's window.

/// Watermark of one partition. Instants and spans are microseconds.
#[derive(Clone, Debug)]
pub struct Clock {
    disorder_bound: i64,
    future_bound: i64,
    newest: Option<i64>,
    tick: Option<i64>,
    /// Records that came from the future.
    pub from_the_future: u64,
}

impl Clock {
    pub fn new(disorder_bound: i64, future_bound: i64) -> Clock {
        Clock { disorder_bound, future_bound, newest: None, tick: None, from_the_future: 0 }
    }

    /// A record of this event time was read.
    pub fn data(&mut self, at: i64) {
        if self.tick.is_some_and(|tick| at > tick.saturating_add(self.future_bound)) {
            self.from_the_future += 1;
        } else {
            self.newest = self.newest.max(Some(at));
        }
    }

    /// The partition's time source says that it is `at`.
    pub fn tick(&mut self, at: i64) {
        self.tick = self.tick.max(Some(at));
        self.newest = self.newest.max(Some(at));
    }

    /// No record older than this is expected any more; none before the first record.
    pub fn watermark(&self) -> Option<i64> {
        self.newest.map(|newest| newest.saturating_sub(self.disorder_bound))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_watermark_follows_data_and_ticks_and_never_goes_back() {
        let mut clock = Clock::new(5, 2);
        assert_eq!(clock.watermark(), None);
        clock.data(10);
        assert_eq!(clock.watermark(), Some(5));
        clock.tick(20);
        assert_eq!(clock.watermark(), Some(15));
        clock.data(3);
        clock.tick(4);
        assert_eq!(clock.watermark(), Some(15));
    }

    #[test]
    fn a_record_from_the_future_moves_no_watermark() {
        let mut clock = Clock::new(5, 2);
        clock.tick(20);
        clock.data(22);
        assert_eq!(clock.watermark(), Some(17));
        clock.data(86_400);
        assert_eq!((clock.watermark(), clock.from_the_future), (Some(17), 1));
    }
}
