//! Rows of the smaller tables to records: events, ticks, topologies and incidents.
//!
//! An event and a tick are a row each, an incident's revision too; the rows of a topology are put together again.

use std::collections::BTreeMap;

use gpufleet_runtime::exit::Failure;
use gpufleet_schemas::record::{
    EventKind, Group, GroupKind, Incident, Severity, State, Telemetry, Tick, Topology, XidEvent,
};

use super::Kept;
use super::columns::{Columns, HostColumns, SourceColumns, number, owned, text};

/// Adds the events of some rows of `xid_events`.
pub(super) fn events(rows: &Columns<'_>, kept: &mut Vec<Kept>) -> Result<(), Failure> {
    let (source, host) = (SourceColumns::of(rows)?, HostColumns::of(rows)?);
    let (kind, code) = (rows.text("kind")?, rows.int("code")?);
    let (gpu_uuid, pci, job_id) = (rows.text("gpu_uuid")?, rows.text("pci")?, rows.text("job_id")?);
    let (pid, process) = (rows.long("pid")?, rows.text("process")?);
    let (gpu_instance, compute_instance) = (rows.int("gpu_instance")?, rows.int("compute_instance")?);
    let (message, raw) = (rows.text("message")?, rows.text("raw")?);
    let (kmsg_sequence, time_estimated) = (rows.long("kmsg_sequence")?, rows.boolean("time_estimated")?);
    for i in 0..rows.len() {
        let event = XidEvent {
            origin: host.origin(i, source.observed_at.value(i)),
            labels: host.labels(i),
            kind: EventKind::from_text(kind.value(i)),
            code: number(code, i),
            gpu_uuid: owned(gpu_uuid, i),
            pci: owned(pci, i),
            pid: number(pid, i),
            process: owned(process, i),
            gpu_instance: number(gpu_instance, i),
            compute_instance: number(compute_instance, i),
            job_id: owned(job_id, i),
            message: message.value(i).to_owned(),
            raw: raw.value(i).to_owned(),
            kmsg_sequence: number(kmsg_sequence, i),
            time_estimated: time_estimated.value(i),
        };
        kept.push(Kept {
            offset: source.offset.value(i),
            appended_at: source.appended_at.value(i),
            record: Telemetry::Event(event),
        });
    }
    Ok(())
}

/// Adds the ticks of some rows of `ticks`.
pub(super) fn ticks(rows: &Columns<'_>, kept: &mut Vec<Kept>) -> Result<(), Failure> {
    let (source, writer) = (SourceColumns::of(rows)?, rows.text("writer")?);
    kept.extend((0..rows.len()).map(|i| Kept {
        offset: source.offset.value(i),
        appended_at: source.appended_at.value(i),
        record: Telemetry::Tick(Tick { tick_at: source.observed_at.value(i), writer: writer.value(i).to_owned() }),
    }));
    Ok(())
}

/// The topology records of a partition, growing.
#[derive(Default)]
pub(super) struct Topologies(BTreeMap<i64, Gathering>);

struct Gathering {
    appended_at: i64,
    epoch_at: i64,
    writer: String,
    /// By position; none in the one row of a record without groups.
    rows: BTreeMap<i32, Option<Group>>,
}

impl Topologies {
    pub(super) fn add(&mut self, rows: &Columns<'_>) -> Result<(), Failure> {
        let (source, writer) = (SourceColumns::of(rows)?, rows.text("writer")?);
        let (kind, key, host) = (rows.text("group_kind")?, rows.text("group_key")?, rows.text("host")?);
        let (rating_watts, position) = (rows.long("rating_watts")?, rows.int("position")?);
        for i in 0..rows.len() {
            let gathering = self.0.entry(source.offset.value(i)).or_insert_with(|| Gathering {
                appended_at: source.appended_at.value(i),
                epoch_at: source.observed_at.value(i),
                writer: writer.value(i).to_owned(),
                rows: BTreeMap::new(),
            });
            let group = text(kind, i).map(|kind| Group {
                kind: GroupKind::from_text(kind),
                key: owned(key, i).unwrap_or_default(),
                hosts: owned(host, i).into_iter().collect(),
                rating_watts: number(rating_watts, i),
            });
            gathering.rows.insert(position.value(i), group);
        }
        Ok(())
    }

    pub(super) fn finish(self) -> Vec<Kept> {
        let kept = |(offset, gathering): (i64, Gathering)| Kept {
            offset,
            appended_at: gathering.appended_at,
            record: Telemetry::Topology(gathering.finish()),
        };
        self.0.into_iter().map(kept).collect()
    }
}

impl Gathering {
    /// Neighbouring rows of one group are its hosts.
    fn finish(self) -> Topology {
        let mut groups: Vec<Group> = Vec::new();
        for group in self.rows.into_values().flatten() {
            match groups.last_mut() {
                Some(last)
                    if last.kind == group.kind
                        && last.key == group.key
                        && last.rating_watts == group.rating_watts
                        && !last.hosts.is_empty()
                        && !group.hosts.is_empty() =>
                {
                    last.hosts.extend(group.hosts);
                }
                _ => groups.push(group),
            }
        }
        Topology { epoch_at: self.epoch_at, writer: self.writer, groups }
    }
}

/// What [`incidents`] reads.
pub(super) const INCIDENT_COLUMNS: [&str; 19] = [
    "id",
    "revision",
    "kind",
    "state",
    "severity",
    "host",
    "gpu_uuid",
    "job_id",
    "feed",
    "code",
    "onset_at",
    "end_at",
    "decided_at",
    "late",
    "summary",
    "source_topic",
    "source_partition",
    "task",
    "emit_seq",
];

/// Hands over the revisions in some rows of `incidents`.
pub(super) fn incidents(rows: &Columns<'_>, log_id: &str, mut take: impl FnMut(Incident)) -> Result<(), Failure> {
    let (id, revision, kind) = (rows.text("id")?, rows.int("revision")?, rows.text("kind")?);
    let (state, severity) = (rows.text("state")?, rows.text("severity")?);
    let (host, gpu_uuid) = (rows.text("host")?, rows.text("gpu_uuid")?);
    let (job_id, feed, code) = (rows.text("job_id")?, rows.text("feed")?, rows.int("code")?);
    let (onset_at, end_at) = (rows.instant("onset_at")?, rows.instant("end_at")?);
    let (decided_at, late) = (rows.instant("decided_at")?, rows.boolean("late")?);
    let (summary, task, emit_seq) = (rows.text("summary")?, rows.text("task")?, rows.long("emit_seq")?);
    let (topic, partition) = (rows.text("source_topic")?, rows.int("source_partition")?);
    for i in 0..rows.len() {
        take(Incident {
            id: id.value(i).to_owned(),
            revision: revision.value(i),
            kind: kind.value(i).to_owned(),
            state: State::from_text(state.value(i)),
            severity: Severity::from_text(severity.value(i)),
            host: host.value(i).to_owned(),
            gpu_uuid: owned(gpu_uuid, i),
            job_id: owned(job_id, i),
            feed: owned(feed, i),
            code: number(code, i),
            onset_at: onset_at.value(i),
            end_at: number(end_at, i),
            decided_at: decided_at.value(i),
            late: late.value(i),
            summary: summary.value(i).to_owned(),
            log_id: log_id.to_owned(),
            topic: topic.value(i).to_owned(),
            partition: partition.value(i),
            task: task.value(i).to_owned(),
            emit_seq: emit_seq.value(i),
            ..Incident::default()
        });
    }
    Ok(())
}
