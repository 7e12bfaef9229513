//! What was planted, as the simulated hardware came to show it. Only the judge of a run reads it.

use serde::Serialize;

use super::fault::Fault;

/// An incident that detection owes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Label {
    pub kind: &'static str,
    pub host: String,
    pub gpu: String,
    pub onset_at: i64,
    /// When it was over; None when it lasts.
    pub end_at: Option<i64>,
    /// How far the found onset and end may lie from these.
    pub grace: i64,
}

/// A look-alike that must stay silent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Decoy {
    pub what: &'static str,
    pub host: String,
    pub gpu: String,
}

#[derive(Clone, Debug, Default)]
pub struct Ledger {
    pub labels: Vec<Label>,
    pub decoys: Vec<Decoy>,
}

const SECOND: i64 = 1_000_000;

impl Ledger {
    /// A GPU was throttled for heat at this tick.
    pub(super) fn throttled(&mut self, host: &str, gpu: &str, at: i64) {
        match self.find("thermal_throttle", gpu) {
            Some(label) => label.end_at = Some(at),
            None => self.add("thermal_throttle", host, gpu, at, Some(at), 20 * SECOND),
        }
    }

    /// A reading showed a counter that a fault had moved.
    pub(super) fn counted(&mut self, kind: &'static str, host: &str, gpu: &str, at: i64) {
        if self.find(kind, gpu).is_none() {
            self.add(kind, host, gpu, at, None, SECOND);
        }
    }

    /// A fault printed a line in the kernel log.
    pub(super) fn event(&mut self, kind: &'static str, host: &str, gpu: &str, at: i64, fault: &Fault) {
        let lasts = !matches!(fault, Fault::ApplicationXid { .. });
        match self.find(kind, gpu).filter(|_| !lasts) {
            Some(label) => label.end_at = Some(at),
            None => self.add(kind, host, gpu, at, (!lasts).then_some(at), SECOND),
        }
    }

    fn find(&mut self, kind: &str, gpu: &str) -> Option<&mut Label> {
        self.labels.iter_mut().find(|label| label.kind == kind && label.gpu == gpu)
    }

    fn add(&mut self, kind: &'static str, host: &str, gpu: &str, onset_at: i64, end_at: Option<i64>, grace: i64) {
        self.labels.push(Label { kind, host: host.to_owned(), gpu: gpu.to_owned(), onset_at, end_at, grace });
    }
}
