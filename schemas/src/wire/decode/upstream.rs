//! Decoding of what stage 1 tells stage 2, and of topology.

use super::super::bytes::Cursor;
use super::super::schema::{Node, RecordNode};
use super::{MAX_ITEMS, MAX_TICKS, Result, int, items, long, optional_long, record, symbol, text, texts};
use crate::record::{Exclusion, Group, GroupKind, Partial, Topology, Upstream, Watermark};

fn group(cursor: &mut Cursor<'_>, node: &Node) -> Result<Group> {
    let mut out = Group::default();
    for field in &record(node)?.fields {
        match field.name.as_str() {
            "kind" => out.kind = GroupKind::from_text(symbol(cursor, &field.node)?),
            "key" => out.key = text(cursor, &field.node)?,
            "hosts" => out.hosts = texts(cursor, &field.node)?,
            "rating_watts" => out.rating_watts = optional_long(cursor, &field.node)?,
            _ => field.node.skip(cursor)?,
        }
    }
    Ok(out)
}

pub(crate) fn topology(cursor: &mut Cursor<'_>, node: &RecordNode) -> Result<Topology> {
    Ok(numbered_topology(cursor, node)?.2)
}

/// The topology that stage 1 passed on, with the task and the number that it gave it.
pub(crate) fn epoch(cursor: &mut Cursor<'_>, node: &RecordNode) -> Result<Upstream> {
    let (task, emit_seq, topology) = numbered_topology(cursor, node)?;
    Ok(Upstream::Topology { task, emit_seq, topology })
}

fn numbered_topology(cursor: &mut Cursor<'_>, node: &RecordNode) -> Result<(String, i64, Topology)> {
    let (mut task, mut emit_seq, mut out) = (String::new(), 0, Topology::default());
    for field in &node.fields {
        match field.name.as_str() {
            "task" => task = text(cursor, &field.node)?,
            "emit_seq" => emit_seq = long(cursor, &field.node)?,
            "epoch_at" => out.epoch_at = long(cursor, &field.node)?,
            "writer" => out.writer = text(cursor, &field.node)?,
            "groups" => items(cursor, &field.node, MAX_ITEMS, |cursor, item| {
                out.groups.push(group(cursor, item)?);
                Ok(())
            })?,
            _ => field.node.skip(cursor)?,
        }
    }
    Ok((task, emit_seq, out))
}

pub(crate) fn partial(cursor: &mut Cursor<'_>, node: &RecordNode) -> Result<Partial> {
    let mut out = Partial::default();
    for field in &node.fields {
        let node = &field.node;
        match field.name.as_str() {
            "task" => out.task = text(cursor, node)?,
            "emit_seq" => out.emit_seq = long(cursor, node)?,
            "group" => out.group = GroupKind::from_text(symbol(cursor, node)?),
            "key" => out.key = text(cursor, node)?,
            "host" => out.host = text(cursor, node)?,
            "pane_at" => out.pane_at = long(cursor, node)?,
            "gpus" => out.gpus = int(cursor, node)?,
            "samples" => out.samples = long(cursor, node)?,
            "milliwatts" => items(cursor, node, MAX_TICKS, |cursor, item| {
                out.milliwatts.push(optional_long(cursor, item)?);
                Ok(())
            })?,
            "first_offset" => out.first_offset = long(cursor, node)?,
            "last_offset" => out.last_offset = long(cursor, node)?,
            _ => node.skip(cursor)?,
        }
    }
    Ok(out)
}

pub(crate) fn watermark(cursor: &mut Cursor<'_>, node: &RecordNode) -> Result<Watermark> {
    let mut out = Watermark::default();
    for field in &node.fields {
        match field.name.as_str() {
            "task" => out.task = text(cursor, &field.node)?,
            "emit_seq" => out.emit_seq = long(cursor, &field.node)?,
            "watermark_at" => out.watermark_at = long(cursor, &field.node)?,
            _ => field.node.skip(cursor)?,
        }
    }
    Ok(out)
}

pub(crate) fn exclusion(cursor: &mut Cursor<'_>, node: &RecordNode) -> Result<Exclusion> {
    let mut out = Exclusion::default();
    for field in &node.fields {
        match field.name.as_str() {
            "task" => out.task = text(cursor, &field.node)?,
            "emit_seq" => out.emit_seq = long(cursor, &field.node)?,
            "excluded" => out.excluded = text(cursor, &field.node)?,
            "watermark_at" => out.watermark_at = long(cursor, &field.node)?,
            _ => field.node.skip(cursor)?,
        }
    }
    Ok(out)
}
