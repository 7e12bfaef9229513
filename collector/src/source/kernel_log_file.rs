//! Kernel logs, recorded or live, to host events.
//!
//! [`read`] takes a whole recorded log and gives its events in the order of their time: they are few, and the stamps of
//! some logs get a time only at the end. [`kernel_event_to_record`] makes the record of one event, for a live reader
//! too. A GPU's uuid is not in a kernel log, so it stays unknown here; whoever has seen the PCI address knows it.

use std::io::{BufRead, Result};

use gpufleet_schemas::record::{Labels, LostReason, Origin, XidEvent};

use super::Losses;
use crate::kernel_log::{self, Clock, Decoded};

/// What a recorded log holds.
#[derive(Debug)]
pub(crate) struct Contents {
    /// By time; the origins have host and instant only.
    pub(crate) events: Vec<XidEvent>,
    pub(crate) losses: Losses,
}

/// Reads a recorded log to its end. `name` is for messages; `host` is that of lines that name none.
///
/// # Errors
/// Only those of `input`; no content is an error.
pub(crate) fn read(input: impl BufRead, name: &str, clock: &Clock, host: &str, labels: &Labels) -> Result<Contents> {
    let mut events = Vec::new();
    let summary = kernel_log::read(input, clock, |decoded| {
        let host = decoded.host.clone().unwrap_or_else(|| host.to_owned());
        let origin = Origin { host, observed_at: decoded.at_micros, ..Origin::default() };
        events.push(kernel_event_to_record(decoded, origin, labels.clone()));
    })?;
    // Stable: events of one instant keep the order of the file.
    events.sort_by_key(|event| event.origin.observed_at);
    let mut losses = Losses::default();
    losses.add(LostReason::UnreadableLine, summary.quoted, || {
        format!("{name}: something other than the kernel quotes a report of the driver")
    });
    losses
        .add(LostReason::CutLine, summary.cut, || format!("{name}: longer than {} bytes", kernel_log::MAX_LINE_BYTES));
    Ok(Contents { events, losses })
}

/// The record of a decoded event. `origin` comes from whoever numbers the host's records.
pub fn kernel_event_to_record(decoded: Decoded, origin: Origin, labels: Labels) -> XidEvent {
    let Decoded { event, estimated, sequence, raw, .. } = decoded;
    XidEvent {
        origin,
        labels,
        kind: event.kind,
        code: event.code,
        gpu_uuid: None,
        pci: event.pci,
        pid: event.pid,
        process: event.process,
        gpu_instance: event.mig.map(|mig| mig.gpu_instance),
        compute_instance: event.mig.and_then(|mig| mig.compute_instance),
        job_id: None,
        message: event.message,
        raw,
        kmsg_sequence: sequence.and_then(|sequence| i64::try_from(sequence).ok()),
        time_estimated: estimated,
    }
}
