//! Records to Avro bytes, in the field order of the newest schema files.

use super::bytes::{put_array, put_bool, put_bytes, put_deltas, put_double, put_long, put_optional, put_text};
use crate::metric::{Metric, Tier};
use crate::record::{
    Evidence, Explained, GpuBatch, GpuBlock, Group, Incident, Labels, Lost, Origin, Partial, Series, Telemetry, Tick,
    Topology, Upstream, XidEvent,
};

fn put_optional_text(out: &mut Vec<u8>, text: Option<&String>) {
    put_optional(out, text, |out, text| put_text(out, text));
}

fn put_optional_int(out: &mut Vec<u8>, value: Option<i32>) {
    put_optional(out, value, |out, value| put_long(out, i64::from(value)));
}

fn put_origin(out: &mut Vec<u8>, origin: &Origin) {
    put_text(out, &origin.host);
    put_text(out, &origin.boot_id);
    put_long(out, origin.seq);
    put_long(out, i64::from(origin.reset_epoch));
    put_text(out, &origin.collector_version);
    put_long(out, origin.observed_at);
    put_array(out, &origin.lost, |out, lost: &Lost| {
        put_long(out, lost.reason as i64);
        put_long(out, lost.count);
        put_optional_text(out, lost.detail.as_ref());
    });
}

fn put_labels(out: &mut Vec<u8>, labels: &Labels) {
    put_optional_text(out, labels.site.as_ref());
    put_optional_text(out, labels.row.as_ref());
    put_optional_text(out, labels.rack.as_ref());
    put_array(out, &labels.feeds, |out, feed| put_text(out, feed));
    put_optional_text(out, labels.driver_version.as_ref());
}

fn put_series(out: &mut Vec<u8>, series: &Series) {
    if series.is_empty() {
        put_long(out, 0);
    } else if series.present.is_empty() {
        put_long(out, 1);
        put_deltas(out, series.values.iter().copied());
    } else {
        put_long(out, 2);
        let mut bits = vec![0u8; series.present.len().div_ceil(8)];
        let mut there = Vec::with_capacity(series.values.len());
        for (i, (present, value)) in series.present.iter().zip(&series.values).enumerate() {
            if *present {
                bits[i / 8] |= 1 << (i % 8);
                there.push(*value);
            }
        }
        put_bytes(out, &bits);
        put_deltas(out, there.into_iter());
    }
}

fn put_positions(out: &mut Vec<u8>, positions: &[i32]) {
    put_array(out, positions, |out, position| put_long(out, i64::from(*position)));
}

fn put_block(out: &mut Vec<u8>, block: &GpuBlock, tick_count: usize) {
    put_text(out, &block.gpu_uuid);
    put_optional_int(out, block.gpu_index);
    put_optional_text(out, block.pci.as_ref());
    put_optional_text(out, block.model.as_ref());
    put_optional_text(out, block.job_id.as_ref());
    put_optional(out, block.step, put_long);
    put_long(out, block.power_kind as i64);
    let fast = block.ticks(Tier::Fast);
    put_optional(out, (fast.len() != tick_count).then_some(fast), put_positions);
    put_positions(out, block.ticks(Tier::Slow));
    put_positions(out, block.ticks(Tier::Health));
    for metric in Metric::ALL {
        put_series(out, block.series(*metric));
    }
}

pub(crate) fn put_batch(out: &mut Vec<u8>, batch: &GpuBatch) {
    put_origin(out, &batch.origin);
    put_labels(out, &batch.labels);
    put_deltas(out, batch.ticks.iter().copied());
    put_array(out, &batch.gpus, |out, block| put_block(out, block, batch.ticks.len()));
}

pub(crate) fn put_event(out: &mut Vec<u8>, event: &XidEvent) {
    put_origin(out, &event.origin);
    put_labels(out, &event.labels);
    put_long(out, event.kind as i64);
    put_optional_int(out, event.code);
    put_optional_text(out, event.gpu_uuid.as_ref());
    put_optional_text(out, event.pci.as_ref());
    put_optional(out, event.pid, put_long);
    put_optional_text(out, event.process.as_ref());
    put_optional_int(out, event.gpu_instance);
    put_optional_int(out, event.compute_instance);
    put_optional_text(out, event.job_id.as_ref());
    put_text(out, &event.message);
    put_text(out, &event.raw);
    put_optional(out, event.kmsg_sequence, put_long);
    put_bool(out, event.time_estimated);
}

pub(crate) fn put_tick(out: &mut Vec<u8>, tick: &Tick) {
    put_long(out, tick.tick_at);
    put_text(out, &tick.writer);
}

pub(crate) fn put_telemetry(out: &mut Vec<u8>, record: &Telemetry) {
    match record {
        Telemetry::Batch(batch) => put_batch(out, batch),
        Telemetry::Event(event) => put_event(out, event),
        Telemetry::Tick(tick) => put_tick(out, tick),
        Telemetry::Topology(topology) => put_topology(out, topology),
    }
}

fn put_topology(out: &mut Vec<u8>, topology: &Topology) {
    put_long(out, topology.epoch_at);
    put_text(out, &topology.writer);
    put_array(out, &topology.groups, |out, group: &Group| {
        put_long(out, group.kind as i64);
        put_text(out, &group.key);
        put_array(out, &group.hosts, |out, host| put_text(out, host));
        put_optional(out, group.rating_watts, put_long);
    });
}

fn put_partial(out: &mut Vec<u8>, partial: &Partial) {
    put_long(out, partial.group as i64);
    put_text(out, &partial.key);
    put_text(out, &partial.host);
    put_long(out, partial.pane_at);
    put_long(out, i64::from(partial.gpus));
    put_long(out, partial.samples);
    put_array(out, &partial.milliwatts, |out, milliwatts| put_optional(out, *milliwatts, put_long));
    put_long(out, partial.first_offset);
    put_long(out, partial.last_offset);
}

pub(crate) fn put_upstream(out: &mut Vec<u8>, record: &Upstream) {
    let number = |out: &mut Vec<u8>, task: &str, emit_seq: i64| {
        put_text(out, task);
        put_long(out, emit_seq);
    };
    match record {
        Upstream::Partial(partial) => {
            number(out, &partial.task, partial.emit_seq);
            put_partial(out, partial);
        }
        Upstream::Watermark(watermark) => {
            number(out, &watermark.task, watermark.emit_seq);
            put_long(out, watermark.watermark_at);
        }
        Upstream::Exclusion(exclusion) => {
            number(out, &exclusion.task, exclusion.emit_seq);
            put_text(out, &exclusion.excluded);
            put_long(out, exclusion.watermark_at);
        }
        Upstream::Topology { task, emit_seq, topology } => {
            number(out, task, *emit_seq);
            put_topology(out, topology);
        }
    }
}

pub(crate) fn put_incident(out: &mut Vec<u8>, incident: &Incident) {
    put_text(out, &incident.id);
    put_long(out, i64::from(incident.revision));
    put_text(out, &incident.kind);
    put_long(out, incident.state as i64);
    put_long(out, incident.severity as i64);
    put_optional_text(out, incident.site.as_ref());
    put_optional_text(out, incident.rack.as_ref());
    put_text(out, &incident.host);
    put_optional_text(out, incident.gpu_uuid.as_ref());
    put_optional_int(out, incident.gpu_index);
    put_optional_text(out, incident.pci.as_ref());
    put_optional_text(out, incident.job_id.as_ref());
    put_optional_text(out, incident.feed.as_ref());
    put_optional_int(out, incident.code);
    put_long(out, incident.onset_at);
    put_optional(out, incident.end_at, put_long);
    put_long(out, incident.decided_at);
    put_bool(out, incident.late);
    put_text(out, &incident.statistic);
    put_double(out, incident.value);
    put_double(out, incident.threshold);
    put_long(out, incident.count);
    put_text(out, &incident.summary);
    put_array(out, &incident.actions, |out, action| put_text(out, action));
    put_array(out, &incident.evidence, |out, evidence: &Evidence| {
        put_long(out, evidence.at);
        put_text(out, &evidence.name);
        put_long(out, evidence.value);
        put_optional(out, evidence.before, put_long);
        put_bool(out, evidence.reset);
    });
    put_array(out, &incident.explains, |out, explained: &Explained| {
        put_text(out, &explained.kind);
        put_optional_int(out, explained.code);
        put_long(out, explained.onset_at);
        put_text(out, &explained.summary);
    });
    put_optional(out, incident.coverage, put_double);
    put_optional_text(out, incident.raw.as_ref());
    put_text(out, &incident.log_id);
    put_text(out, &incident.topic);
    put_long(out, i64::from(incident.partition));
    put_long(out, incident.first_offset);
    put_long(out, incident.last_offset);
    put_text(out, &incident.detector);
    put_text(out, &incident.task);
    put_long(out, incident.emit_seq);
}
