//! Rows of `incidents`: one per revision.

use std::sync::Arc;

use arrow::array::{ArrayRef, BooleanBuilder, Float64Builder, Int32Builder, Int64Builder, RecordBatch, StringBuilder};
use arrow::error::ArrowError;
use gpufleet_schemas::record::Incident;
use gpufleet_schemas::table::Table;

use super::{Instants, Place, SourceColumns, finish};

/// Rows of `incidents`.
#[derive(Default)]
pub struct IncidentRows {
    source: SourceColumns,
    id: StringBuilder,
    revision: Int32Builder,
    kind: StringBuilder,
    state: StringBuilder,
    severity: StringBuilder,
    site: StringBuilder,
    rack: StringBuilder,
    host: StringBuilder,
    gpu_uuid: StringBuilder,
    gpu_index: Int32Builder,
    pci: StringBuilder,
    job_id: StringBuilder,
    feed: StringBuilder,
    code: Int32Builder,
    onset_at: Instants,
    end_at: Instants,
    decided_at: Instants,
    late: BooleanBuilder,
    statistic: StringBuilder,
    value: Float64Builder,
    threshold: Float64Builder,
    count: Int64Builder,
    summary: StringBuilder,
    actions: StringBuilder,
    evidence: StringBuilder,
    explains: StringBuilder,
    coverage: Float64Builder,
    raw: StringBuilder,
    source_topic: StringBuilder,
    source_partition: Int32Builder,
    first_offset: Int64Builder,
    last_offset: Int64Builder,
    detector: StringBuilder,
    task: StringBuilder,
    emit_seq: Int64Builder,
    rows: usize,
}

impl IncidentRows {
    /// The row's event time is the onset, so that every revision is filed under one date.
    pub fn push(&mut self, place: Place<'_>, incident: &Incident) {
        self.source.push(place, incident.onset_at);
        self.id.append_value(&incident.id);
        self.revision.append_value(incident.revision);
        self.kind.append_value(&incident.kind);
        self.state.append_value(incident.state.as_str());
        self.severity.append_value(incident.severity.as_str());
        self.site.append_option(incident.site.as_ref());
        self.rack.append_option(incident.rack.as_ref());
        self.host.append_value(&incident.host);
        self.gpu_uuid.append_option(incident.gpu_uuid.as_ref());
        self.gpu_index.append_option(incident.gpu_index);
        self.pci.append_option(incident.pci.as_ref());
        self.job_id.append_option(incident.job_id.as_ref());
        self.feed.append_option(incident.feed.as_ref());
        self.code.append_option(incident.code);
        self.onset_at.0.append_value(incident.onset_at);
        self.end_at.0.append_option(incident.end_at);
        self.decided_at.0.append_value(incident.decided_at);
        self.late.append_value(incident.late);
        self.statistic.append_value(&incident.statistic);
        self.value.append_value(incident.value);
        self.threshold.append_value(incident.threshold);
        self.count.append_value(incident.count);
        self.summary.append_value(&incident.summary);
        self.actions.append_value(incident.actions.join("; "));
        self.evidence.append_value(serde_json::to_string(&incident.evidence).unwrap_or_default());
        let explains = (!incident.explains.is_empty()).then(|| serde_json::to_string(&incident.explains));
        self.explains.append_option(explains.and_then(Result::ok));
        self.coverage.append_option(incident.coverage);
        self.raw.append_option(incident.raw.as_ref());
        self.source_topic.append_value(&incident.topic);
        self.source_partition.append_value(incident.partition);
        self.first_offset.append_value(incident.first_offset);
        self.last_offset.append_value(incident.last_offset);
        self.detector.append_value(&incident.detector);
        self.task.append_value(&incident.task);
        self.emit_seq.append_value(incident.emit_seq);
        self.rows += 1;
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn finish(&mut self) -> Result<RecordBatch, ArrowError> {
        let mut columns = self.source.finish();
        columns.extend(finish![
            self.id,
            self.revision,
            self.kind,
            self.state,
            self.severity,
            self.site,
            self.rack,
            self.host,
            self.gpu_uuid,
            self.gpu_index,
            self.pci,
            self.job_id,
            self.feed,
            self.code,
            self.onset_at.0,
            self.end_at.0,
            self.decided_at.0,
            self.late,
            self.statistic,
            self.value,
            self.threshold,
            self.count,
            self.summary,
            self.actions,
            self.evidence,
            self.explains,
            self.coverage,
            self.raw,
            self.source_topic,
            self.source_partition,
            self.first_offset,
            self.last_offset,
            self.detector,
            self.task,
            self.emit_seq,
        ]);
        self.rows = 0;
        RecordBatch::try_new(Table::Incidents.schema(), columns)
    }
}
