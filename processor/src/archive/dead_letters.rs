//! Records that are none: to the dead-letter topic, untouched, with where they came from and why as headers.
//!
//! A flood of them is not copied: a breaker per source partition opens for the rest of a minute, so that a producer
//! that writes nothing but rubbish cannot double the cluster's traffic. What is held back is in the log, and counted.

use std::collections::HashMap;
use std::time::Duration;

use gpufleet_runtime::exit::Failure;
use gpufleet_runtime::kafka::{Destination, Message, Writer};
use gpufleet_schemas::instant::SECOND;
use gpufleet_schemas::wire::DecodeError;

use super::commit::Partition;

const PATIENCE: Duration = Duration::from_secs(60);
const MINUTE: i64 = 60 * SECOND;
/// So many undecodable records a minute are copied whatever their share.
const ALWAYS_COPIED: u64 = 100;
/// The breaker opens when more than one record in so many is undecodable.
const ONE_IN: u64 = 100;

/// What `losses` says of a record that an open breaker held back.
pub const HELD_BACK: &str = "not sent to the dead-letter topic: more than 1 % of the minute's records are undecodable";

/// Larger records are counted and not copied.
const LARGEST: usize = 900_000;

/// What becomes of an undecodable record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Copy,
    /// This record opened the breaker and is the first to be held back.
    Open,
    HoldBack,
}

/// Decides for one partition, from what its running minute has shown. Once open, it stays so until the minute is over.
#[derive(Clone, Debug, Default)]
pub struct Breaker {
    /// Minutes since 1970, by the broker's stamp; it never goes back.
    minute: i64,
    records: u64,
    undecodable: u64,
    open: bool,
}

impl Breaker {
    /// Counts a record, readable or not.
    pub fn count(&mut self, stamped_at: i64) {
        let minute = stamped_at.div_euclid(MINUTE);
        // A stamp far ahead was another clock's: it holds nothing back for long.
        if minute > self.minute || minute < self.minute - 1 {
            *self = Breaker { minute, ..Breaker::default() };
        }
        self.records += 1;
    }

    /// The record that was counted last is undecodable.
    pub fn judge(&mut self) -> Verdict {
        self.undecodable += 1;
        if self.open {
            return Verdict::HoldBack;
        }
        self.open = self.undecodable > ALWAYS_COPIED && self.undecodable * ONE_IN > self.records;
        if self.open { Verdict::Open } else { Verdict::Copy }
    }
}

/// Writes dead letters.
pub struct DeadLetters {
    writer: Writer,
    topic: String,
    breakers: HashMap<Partition, Breaker>,
    pub written: u64,
}

impl DeadLetters {
    pub fn open(brokers: &str, topic: &str) -> Result<DeadLetters, Failure> {
        let writer = Writer::open(brokers)?;
        Ok(DeadLetters { writer, topic: topic.to_owned(), breakers: HashMap::new(), written: 0 })
    }

    /// Takes note of a record, readable or not: what is undecodable is judged by its share.
    pub fn count(&mut self, partition: &Partition, stamped_at: i64) {
        if let Some(breaker) = self.breakers.get_mut(partition) {
            breaker.count(stamped_at);
        } else {
            self.breakers.entry(partition.clone()).or_default().count(stamped_at);
        }
    }

    /// Copies an undecodable record that was counted before, unless its partition's breaker is open. Tells whether it
    /// was copied.
    pub fn write(&mut self, message: &Message, error: &DecodeError) -> Result<bool, Failure> {
        let breaker = self.breakers.entry((message.topic.clone(), message.partition)).or_default();
        match breaker.judge() {
            Verdict::Copy => {}
            Verdict::HoldBack => return Ok(false),
            Verdict::Open => {
                tracing::warn!(
                    topic = message.topic.as_str(),
                    partition = message.partition,
                    offset = message.offset,
                    undecodable = breaker.undecodable,
                    records = breaker.records,
                    %error,
                    "too many undecodable records: no more dead letters of this partition for the rest of the minute"
                );
                return Ok(false);
            }
        }
        // A copy with its headers must fit into what a broker takes.
        if message.payload.len() + message.key.len() > LARGEST {
            return Ok(false);
        }
        let (partition, offset, text) = (message.partition.to_string(), message.offset.to_string(), error.to_string());
        let headers = [
            ("source_topic", message.topic.as_str()),
            ("source_partition", partition.as_str()),
            ("source_offset", offset.as_str()),
            ("reason", error.reason()),
            ("error", text.as_str()),
            ("version", env!("CARGO_PKG_VERSION")),
        ];
        let to = Destination { topic: &self.topic, partition: 0 };
        self.writer.send(to, &message.key, Some(&message.payload), &headers, |_| {})?;
        self.written += 1;
        Ok(true)
    }

    /// Waits until the broker has them: only then may their offsets be committed.
    pub fn flush(&self) -> Result<(), Failure> {
        self.writer.flush(PATIENCE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verdicts on `undecodable` records at `at`, after `readable` ones.
    fn judge(breaker: &mut Breaker, at: i64, readable: usize, undecodable: usize) -> Vec<Verdict> {
        (0..readable).for_each(|_| breaker.count(at));
        let one = |_| {
            breaker.count(at);
            breaker.judge()
        };
        (0..undecodable).map(one).collect()
    }

    #[test]
    fn a_minute_of_rubbish_is_copied_a_hundred_times_and_then_held_back() {
        let mut breaker = Breaker::default();
        let verdicts = judge(&mut breaker, 90 * SECOND, 0, 1000);
        assert!(verdicts[..100].iter().all(|verdict| *verdict == Verdict::Copy));
        assert_eq!(verdicts[100], Verdict::Open, "said once");
        assert!(verdicts[101..].iter().all(|verdict| *verdict == Verdict::HoldBack));
    }

    #[test]
    fn one_record_in_a_hundred_is_no_flood() {
        let mut breaker = Breaker::default();
        assert!(judge(&mut breaker, 0, 99 * 500, 500).iter().all(|verdict| *verdict == Verdict::Copy));
        assert_eq!(judge(&mut breaker, 0, 0, 1), [Verdict::Open], "one more is");
    }

    #[test]
    fn an_open_breaker_closes_with_the_minute_and_not_before() {
        let mut breaker = Breaker::default();
        judge(&mut breaker, 0, 0, 101);
        assert_eq!(judge(&mut breaker, 59 * SECOND, 1_000_000, 1), [Verdict::HoldBack]);
        assert_eq!(judge(&mut breaker, 60 * SECOND, 0, 1), [Verdict::Copy]);
        assert_eq!(judge(&mut breaker, 59 * SECOND, 0, 1), [Verdict::Copy], "a stamp that goes back starts nothing");
        assert_eq!(breaker.undecodable, 2);
    }
}
