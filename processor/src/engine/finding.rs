//! What a detector says: an episode in which something was wrong, as far as it knows at the moment.

use gpufleet_schemas::record::{Evidence, Severity};
use serde::{Deserialize, Serialize};

use super::Entity;

/// Range of offsets that the facts of a finding lie in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offsets {
    pub first: i64,
    pub last: i64,
}

impl Default for Offsets {
    /// Holds nothing.
    fn default() -> Offsets {
        Offsets { first: i64::MAX, last: i64::MIN }
    }
}

impl Offsets {
    pub fn include(&mut self, offset: i64) {
        self.first = self.first.min(offset);
        self.last = self.last.max(offset);
    }

    pub fn merge(&mut self, other: Offsets) {
        self.first = self.first.min(other.first);
        self.last = self.last.max(other.last);
    }
}

/// One episode of one entity. A detector repeats it as long as it may still change; the book says what is new.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    pub kind: &'static str,
    /// What causes it: findings of one GPU with the same cause are one page (`detect/precedence.rs`).
    pub cause: Option<&'static str>,
    /// Identity of whom it concerns within the host, as it was when the episode began: a GPU, a slot, or nothing.
    pub subject: String,
    /// Distinguishes episodes of one entity that may overlap, such as two Xid codes.
    pub facet: String,
    pub entity: Entity,
    pub severity: Severity,
    pub onset_at: i64,
    /// None while it goes on.
    pub end_at: Option<i64>,
    pub late: bool,
    pub code: Option<i32>,
    pub statistic: &'static str,
    pub value: f64,
    pub threshold: f64,
    pub count: i64,
    pub summary: String,
    pub actions: Vec<String>,
    pub evidence: Vec<Evidence>,
    /// Share of the expected hosts that were heard; none where one host speaks for itself.
    pub coverage: Option<f64>,
    pub raw: Option<String>,
    pub offsets: Offsets,
}
