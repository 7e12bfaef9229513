//! Tumbling and sliding windows over event time, built from panes.
//!
//! A pane gathers what fell into one stretch of time; a window `[start, end)` is some neighbouring panes merged, so a
//! window of one pane tumbles and one of several slides by a pane. Panes are kept until no window that could still be
//! revised needs them: a late record within the allowance changes its windows, a later one is counted and left out.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What a stretch of time gathers. Merging is commutative: integers only, no float whose order would matter.
pub trait Pane: Default {
    fn merge(&mut self, other: &Self);
}

/// The panes of one entity.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Panes<P> {
    length: i64,
    per_window: i64,
    panes: BTreeMap<i64, P>,
    /// Windows that end at or before this instant are final.
    floor: i64,
    /// Records that came too late for every window.
    pub too_late: u64,
}

impl<P: Pane> Panes<P> {
    /// Panes of `length` microseconds, `per_window` to a window.
    pub fn new(length: i64, per_window: i64) -> Panes<P> {
        Panes {
            length: length.max(1),
            per_window: per_window.max(1),
            panes: BTreeMap::new(),
            floor: i64::MIN,
            too_late: 0,
        }
    }

    /// The pane that `at` falls into; none when all its windows are final.
    pub fn at(&mut self, at: i64) -> Option<&mut P> {
        let start = at.div_euclid(self.length) * self.length;
        // The last window that holds this pane ends so much later.
        if start.saturating_add(self.length * self.per_window) <= self.floor {
            self.too_late += 1;
            return None;
        }
        Some(self.panes.entry(start).or_default())
    }

    /// The window that ends at `end`, a multiple of the pane length; none when nothing fell into it.
    pub fn window(&self, end: i64) -> Option<P> {
        let start = end.saturating_sub(self.length * self.per_window);
        let mut panes = self.panes.range(start..end).peekable();
        panes.peek()?;
        let mut window = P::default();
        for (_, pane) in panes {
            window.merge(pane);
        }
        Some(window)
    }

    /// Ends of the windows that close in `(after, until]`.
    pub fn ends(&self, after: i64, until: i64) -> impl Iterator<Item = i64> + use<P> {
        let length = self.length;
        let mut end = after.div_euclid(length) * length;
        std::iter::from_fn(move || {
            end += length;
            (end <= until).then_some(end)
        })
    }

    /// Makes every window that ends at or before `floor` final and forgets what no other needs.
    pub fn settle(&mut self, floor: i64) {
        if floor > self.floor {
            self.floor = floor;
            let needed_from =
                floor.saturating_sub(self.length * (self.per_window - 1)).div_euclid(self.length) * self.length;
            if self.panes.first_key_value().is_some_and(|(start, _)| *start < needed_from - self.length) {
                self.panes = self.panes.split_off(&(needed_from - self.length));
            }
        }
    }

    /// Whether these are panes of such windows; another configuration may have left others.
    pub fn are_of(&self, length: i64, per_window: i64) -> bool {
        (self.length, self.per_window) == (length.max(1), per_window.max(1))
    }

    pub fn is_empty(&self) -> bool {
        self.panes.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = (i64, &P)> {
        self.panes.iter().map(|(start, pane)| (*start, pane))
    }
}

#[cfg(test)]
mod tests;
