//! Folding facts in the order of their time, whatever the order of their arrival.
//!
//! A detector's state is a fold over facts. Facts younger than the allowed lateness wait in time order; the present is
//! the settled state with the waiting facts folded over it, so a late fact within the allowance revises the present by
//! recomputation. What has settled is final.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A state that facts of type `T` change, in time order.
pub trait Fold<T> {
    /// What the fold goes by and what is no part of its state: thresholds.
    type Rule;

    fn step(&mut self, at: i64, fact: &T, rule: &Self::Rule);
}

/// A fold whose facts may arrive in any order within the allowed lateness.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Reorder<T, S> {
    settled: S,
    /// By time, then by the record's number and the fact's place in it, so that equal instants have one order.
    waiting: BTreeMap<(i64, i64, u32), T>,
}

impl<T, S: Default> Default for Reorder<T, S> {
    fn default() -> Reorder<T, S> {
        Reorder { settled: S::default(), waiting: BTreeMap::new() }
    }
}

impl<T, S: Fold<T> + Clone> Reorder<T, S> {
    pub fn insert(&mut self, at: i64, seq: i64, place: u32, fact: T) {
        self.waiting.insert((at, seq, place), fact);
    }

    /// Folds at once a fact that is older than what has settled, for facts that are never too late.
    pub fn insert_late(&mut self, at: i64, fact: &T, rule: &S::Rule) {
        self.settled.step(at, fact, rule);
    }

    /// Makes everything up to `floor` final.
    pub fn settle(&mut self, floor: i64, rule: &S::Rule) {
        while let Some(entry) = self.waiting.first_entry() {
            if entry.key().0 > floor {
                break;
            }
            let ((at, _, _), fact) = entry.remove_entry();
            self.settled.step(at, &fact, rule);
        }
    }

    /// The state with everything up to `now`.
    pub fn present(&self, now: i64, rule: &S::Rule) -> S {
        let mut state = self.settled.clone();
        for ((at, _, _), fact) in self.waiting.range(..=(now, i64::MAX, u32::MAX)) {
            state.step(*at, fact, rule);
        }
        state
    }

    /// The state that is final, to forget what is over.
    pub fn settled_mut(&mut self) -> &mut S {
        &mut self.settled
    }

    /// Whether facts wait to become final.
    pub fn waits(&self) -> bool {
        !self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Debug, Default, PartialEq)]
    struct Order(Vec<i64>);

    impl Fold<i64> for Order {
        type Rule = ();

        fn step(&mut self, at: i64, fact: &i64, (): &()) {
            assert_eq!(at, *fact);
            self.0.push(at);
        }
    }

    #[test]
    fn facts_are_folded_in_time_order_whatever_order_they_came_in() {
        let mut fold: Reorder<i64, Order> = Reorder::default();
        for at in [30, 10, 50, 20, 40] {
            fold.insert(at, at, 0, at);
        }
        assert_eq!(fold.present(35, &()).0, [10, 20, 30]);
        fold.settle(20, &());
        fold.insert(25, 25, 0, 25);
        assert_eq!(fold.present(100, &()).0, [10, 20, 25, 30, 40, 50]);
        assert!(fold.waits());
        fold.settle(100, &());
        assert!(!fold.waits());
    }
}
