//! Rows of `ticks` and `topology`: what a partition carries besides readings and events.
//!
//! Both are there so that detection can be fed from the lake as the log fed it. A repeated tick is a row of its own,
//! because it has an offset of its own.

use std::sync::Arc;

use arrow::array::{ArrayRef, Int32Builder, Int64Builder, RecordBatch, StringBuilder};
use arrow::error::ArrowError;
use gpufleet_schemas::record::{Group, Tick, Topology};
use gpufleet_schemas::table::Table;

use super::{Place, SourceColumns, finish};

/// Rows of `ticks`.
#[derive(Default)]
pub struct TickRows {
    source: SourceColumns,
    writer: StringBuilder,
    rows: usize,
}

impl TickRows {
    pub fn push(&mut self, place: Place<'_>, tick: &Tick) {
        self.source.push(place, tick.tick_at);
        self.writer.append_value(&tick.writer);
        self.rows += 1;
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn finish(&mut self) -> Result<RecordBatch, ArrowError> {
        let mut columns = self.source.finish();
        columns.extend(finish![self.writer]);
        self.rows = 0;
        RecordBatch::try_new(Table::Ticks.schema(), columns)
    }
}

/// Rows of `topology`.
#[derive(Default)]
pub struct TopologyRows {
    source: SourceColumns,
    writer: StringBuilder,
    group_kind: StringBuilder,
    group_key: StringBuilder,
    host: StringBuilder,
    rating_watts: Int64Builder,
    position: Int32Builder,
    rows: usize,
}

impl TopologyRows {
    /// A row for each host of each group. A group without hosts, and a record without groups, is one row all the same:
    /// it says that nothing is there.
    pub fn push(&mut self, place: Place<'_>, topology: &Topology) {
        let mut position = 0;
        for group in &topology.groups {
            for host in &group.hosts {
                self.push_row(place, topology, Some(group), Some(host), &mut position);
            }
            if group.hosts.is_empty() {
                self.push_row(place, topology, Some(group), None, &mut position);
            }
        }
        if topology.groups.is_empty() {
            self.push_row(place, topology, None, None, &mut position);
        }
    }

    fn push_row(
        &mut self,
        place: Place<'_>,
        topology: &Topology,
        group: Option<&Group>,
        host: Option<&String>,
        position: &mut i32,
    ) {
        self.source.push(place, topology.epoch_at);
        self.writer.append_value(&topology.writer);
        self.group_kind.append_option(group.map(|group| group.kind.as_str()));
        self.group_key.append_option(group.map(|group| &group.key));
        self.host.append_option(host);
        self.rating_watts.append_option(group.and_then(|group| group.rating_watts));
        self.position.append_value(*position);
        *position += 1;
        self.rows += 1;
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn finish(&mut self) -> Result<RecordBatch, ArrowError> {
        let mut columns = self.source.finish();
        columns.extend(finish![
            self.writer,
            self.group_kind,
            self.group_key,
            self.host,
            self.rating_watts,
            self.position,
        ]);
        self.rows = 0;
        RecordBatch::try_new(Table::Topology.schema(), columns)
    }
}
