//! Avro bytes to records, along the writer's schema.
//!
//! Each function walks the writer's fields in the writer's order, keeps those it knows and steps over the rest; a
//! field that the writer did not have keeps its default. Untrusted input: bounded, and never a panic (law L9).

mod upstream;

use super::DecodeError;
use super::bytes::Cursor;
use super::schema::{Node, RecordNode};
use crate::metric::{MetricSet, Tier};
use crate::record::{
    EventKind, Evidence, Explained, GpuBatch, GpuBlock, Incident, Labels, Lost, LostReason, Origin, PowerKind, Series,
    Severity, State, Tick, XidEvent,
};

pub(crate) use upstream::{epoch, exclusion, partial, topology, watermark};

type Result<T> = std::result::Result<T, DecodeError>;

/// Bounds of one batch; beyond them a record is refused, not truncated.
const MAX_TICKS: usize = 4096;
const MAX_GPUS: usize = 1024;
const MAX_ITEMS: usize = 65_536;
const MAX_FEEDS: usize = 16;

const WRONG_TYPE: DecodeError = DecodeError::Malformed("a field has another type than its name promises");

fn long(cursor: &mut Cursor<'_>, node: &Node) -> Result<i64> {
    match node.branch(cursor)? {
        Node::Long => cursor.long(),
        _ => Err(WRONG_TYPE),
    }
}

fn int(cursor: &mut Cursor<'_>, node: &Node) -> Result<i32> {
    i32::try_from(long(cursor, node)?).map_err(|_| DecodeError::Malformed("an int has more than 32 bits"))
}

fn optional_long(cursor: &mut Cursor<'_>, node: &Node) -> Result<Option<i64>> {
    match node.branch(cursor)? {
        Node::Null => Ok(None),
        Node::Long => cursor.long().map(Some),
        _ => Err(WRONG_TYPE),
    }
}

fn optional_int(cursor: &mut Cursor<'_>, node: &Node) -> Result<Option<i32>> {
    match node.branch(cursor)? {
        Node::Null => Ok(None),
        Node::Long => cursor.int().map(Some),
        _ => Err(WRONG_TYPE),
    }
}

fn boolean(cursor: &mut Cursor<'_>, node: &Node) -> Result<bool> {
    match node.branch(cursor)? {
        Node::Boolean => cursor.boolean(),
        _ => Err(WRONG_TYPE),
    }
}

fn double(cursor: &mut Cursor<'_>, node: &Node) -> Result<f64> {
    match node.branch(cursor)? {
        Node::Double => cursor.double(),
        Node::Float => cursor.float().map(f64::from),
        _ => Err(WRONG_TYPE),
    }
}

fn optional_double(cursor: &mut Cursor<'_>, node: &Node) -> Result<Option<f64>> {
    match node.branch(cursor)? {
        Node::Null => Ok(None),
        Node::Double => cursor.double().map(Some),
        Node::Float => cursor.float().map(|value| Some(f64::from(value))),
        _ => Err(WRONG_TYPE),
    }
}

/// Reads into a string that is there already, so that a steady stream allocates little.
fn text_into(cursor: &mut Cursor<'_>, node: &Node, out: &mut String) -> Result<()> {
    match node.branch(cursor)? {
        Node::Text => {
            out.clear();
            out.push_str(cursor.text()?);
            Ok(())
        }
        _ => Err(WRONG_TYPE),
    }
}

fn text(cursor: &mut Cursor<'_>, node: &Node) -> Result<String> {
    let mut out = String::new();
    text_into(cursor, node, &mut out)?;
    Ok(out)
}

fn optional_text(cursor: &mut Cursor<'_>, node: &Node) -> Result<Option<String>> {
    match node.branch(cursor)? {
        Node::Null => Ok(None),
        Node::Text => cursor.text().map(|text| Some(text.to_owned())),
        _ => Err(WRONG_TYPE),
    }
}

/// The symbol of an enum; one that the writer's schema lacks is an error, one that we lack is for the caller.
fn symbol<'n>(cursor: &mut Cursor<'_>, node: &'n Node) -> Result<&'n str> {
    match node.branch(cursor)? {
        Node::Enum(symbols) => usize::try_from(cursor.long()?)
            .ok()
            .and_then(|at| symbols.get(at))
            .map(String::as_str)
            .ok_or(DecodeError::Malformed("an enum has no such symbol")),
        _ => Err(WRONG_TYPE),
    }
}

/// Calls `each` for every item of an array, at most `bound` of them.
fn items(
    cursor: &mut Cursor<'_>,
    node: &Node,
    bound: usize,
    mut each: impl FnMut(&mut Cursor<'_>, &Node) -> Result<()>,
) -> Result<()> {
    let Node::Array(item) = node else { return Err(WRONG_TYPE) };
    let mut total = 0;
    loop {
        let count = cursor.block()?;
        if count == 0 {
            return Ok(());
        }
        total += count;
        if total > bound {
            return Err(DecodeError::Malformed("an array is longer than its bound"));
        }
        for _ in 0..count {
            each(cursor, item)?;
        }
    }
}

fn texts(cursor: &mut Cursor<'_>, node: &Node) -> Result<Vec<String>> {
    let mut out = Vec::new();
    items(cursor, node, MAX_ITEMS, |cursor, item| {
        out.push(text(cursor, item)?);
        Ok(())
    })?;
    Ok(out)
}

fn record(node: &Node) -> Result<&RecordNode> {
    match node {
        Node::Record(record) => Ok(record),
        _ => Err(WRONG_TYPE),
    }
}

fn lost(cursor: &mut Cursor<'_>, node: &Node) -> Result<Lost> {
    let mut out = Lost::default();
    for field in &record(node)?.fields {
        match field.name.as_str() {
            "reason" => out.reason = LostReason::from_text(symbol(cursor, &field.node)?),
            "count" => out.count = long(cursor, &field.node)?,
            "detail" => out.detail = optional_text(cursor, &field.node)?,
            _ => field.node.skip(cursor)?,
        }
    }
    Ok(out)
}

fn origin(cursor: &mut Cursor<'_>, node: &Node, out: &mut Origin) -> Result<()> {
    for field in &record(node)?.fields {
        match field.name.as_str() {
            "host" => text_into(cursor, &field.node, &mut out.host)?,
            "boot_id" => text_into(cursor, &field.node, &mut out.boot_id)?,
            "seq" => out.seq = long(cursor, &field.node)?,
            "reset_epoch" => out.reset_epoch = int(cursor, &field.node)?,
            "collector_version" => text_into(cursor, &field.node, &mut out.collector_version)?,
            "observed_at" => out.observed_at = long(cursor, &field.node)?,
            "lost" => items(cursor, &field.node, MAX_ITEMS, |cursor, item| {
                out.lost.push(lost(cursor, item)?);
                Ok(())
            })?,
            _ => field.node.skip(cursor)?,
        }
    }
    Ok(())
}

fn labels(cursor: &mut Cursor<'_>, node: &Node, out: &mut Labels) -> Result<()> {
    for field in &record(node)?.fields {
        match field.name.as_str() {
            "site" => out.site = optional_text(cursor, &field.node)?,
            "row" => out.row = optional_text(cursor, &field.node)?,
            "rack" => out.rack = optional_text(cursor, &field.node)?,
            "feeds" => {
                out.feeds = texts(cursor, &field.node)?;
                if out.feeds.len() > MAX_FEEDS {
                    return Err(DecodeError::Malformed("a host has more feeds than any"));
                }
            }
            "driver_version" => out.driver_version = optional_text(cursor, &field.node)?,
            _ => field.node.skip(cursor)?,
        }
    }
    Ok(())
}

/// Sums up differences; wraps as the writer does.
fn deltas(cursor: &mut Cursor<'_>, node: &Node, out: &mut Vec<i64>) -> Result<()> {
    let Node::Array(item) = node else { return Err(WRONG_TYPE) };
    if !matches!(**item, Node::Long) {
        return Err(WRONG_TYPE);
    }
    out.clear();
    let mut value = 0i64;
    loop {
        let count = cursor.block()?;
        if count == 0 {
            return Ok(());
        }
        if out.len() + count > MAX_TICKS {
            return Err(DecodeError::Malformed("a series is longer than its bound"));
        }
        out.reserve(count);
        for _ in 0..count {
            value = value.wrapping_add(cursor.long()?);
            out.push(value);
        }
    }
}

fn positions(cursor: &mut Cursor<'_>, node: &Node, out: &mut Vec<i32>) -> Result<()> {
    out.clear();
    items(cursor, node, MAX_TICKS, |cursor, _| {
        out.push(cursor.int()?);
        Ok(())
    })
}

/// A series with missing ticks: a bit map, and the differences of the values that are there.
fn sparse_series(cursor: &mut Cursor<'_>, node: &RecordNode, ticks: usize, out: &mut Series) -> Result<()> {
    let (mut bits, mut there): (&[u8], Vec<i64>) = (&[], Vec::new());
    for field in &node.fields {
        match field.name.as_str() {
            "present" if matches!(field.node, Node::Bytes) => bits = cursor.bytes()?,
            "values" => deltas(cursor, &field.node, &mut there)?,
            _ => field.node.skip(cursor)?,
        }
    }
    if bits.len() != ticks.div_ceil(8) {
        return Err(DecodeError::Malformed("a bit map does not fit its ticks"));
    }
    let mut there = there.into_iter();
    for tick in 0..ticks {
        let present = bits[tick / 8] & (1 << (tick % 8)) != 0;
        let value = if present {
            there.next().ok_or(DecodeError::Malformed("a bit map promises more values than there are"))?
        } else {
            0
        };
        out.present.push(present);
        out.values.push(value);
    }
    match there.next() {
        None => Ok(()),
        Some(_) => Err(DecodeError::Malformed("a bit map promises fewer values than there are")),
    }
}

fn series(cursor: &mut Cursor<'_>, node: &Node, ticks: usize, out: &mut Series) -> Result<()> {
    match node.branch(cursor)? {
        Node::Null => Ok(()),
        array @ Node::Array(_) => {
            deltas(cursor, array, &mut out.values)?;
            if out.values.len() == ticks {
                Ok(())
            } else {
                Err(DecodeError::Malformed("a series does not fit its ticks"))
            }
        }
        Node::Record(sparse) => sparse_series(cursor, sparse, ticks, out),
        _ => Err(WRONG_TYPE),
    }
}

fn ascending_below(positions: &[i32], bound: usize) -> bool {
    positions.windows(2).all(|pair| pair[0] < pair[1])
        && positions.first().is_none_or(|first| *first >= 0)
        && positions.last().is_none_or(|last| usize::try_from(*last).is_ok_and(|last| last < bound))
}

fn block(cursor: &mut Cursor<'_>, node: &Node, tick_count: usize, wanted: MetricSet, out: &mut GpuBlock) -> Result<()> {
    out.clear();
    out.tier_ticks[Tier::Fast as usize].extend(0..i32::try_from(tick_count).unwrap_or(i32::MAX));
    for field in &record(node)?.fields {
        if let Some(metric) = field.metric {
            if wanted.contains(metric) {
                let ticks = out.ticks(metric.tier()).len();
                series(cursor, &field.node, ticks, &mut out.series[metric.index()])?;
            } else {
                field.node.skip(cursor)?;
            }
            continue;
        }
        match field.name.as_str() {
            "gpu_uuid" => text_into(cursor, &field.node, &mut out.gpu_uuid)?,
            "gpu_index" => out.gpu_index = optional_int(cursor, &field.node)?,
            "pci" => out.pci = optional_text(cursor, &field.node)?,
            "model" => out.model = optional_text(cursor, &field.node)?,
            "job_id" => out.job_id = optional_text(cursor, &field.node)?,
            "step" => out.step = optional_long(cursor, &field.node)?,
            "power_kind" => out.power_kind = PowerKind::from_text(symbol(cursor, &field.node)?),
            "fast_ticks" => match field.node.branch(cursor)? {
                Node::Null => {}
                node => positions(cursor, node, &mut out.tier_ticks[Tier::Fast as usize])?,
            },
            "slow_ticks" => positions(cursor, &field.node, &mut out.tier_ticks[Tier::Slow as usize])?,
            "health_ticks" => positions(cursor, &field.node, &mut out.tier_ticks[Tier::Health as usize])?,
            _ => field.node.skip(cursor)?,
        }
    }
    if out.gpu_uuid.is_empty() {
        return Err(DecodeError::Malformed("a GPU has no identity"));
    }
    if !out.tier_ticks.iter().all(|positions| ascending_below(positions, tick_count)) {
        return Err(DecodeError::Malformed("tick positions do not ascend within the batch"));
    }
    Ok(())
}

fn blocks(
    cursor: &mut Cursor<'_>,
    node: &Node,
    wanted: MetricSet,
    ticks: usize,
    gpus: &mut Vec<GpuBlock>,
) -> Result<()> {
    let mut count = 0;
    items(cursor, node, MAX_GPUS, |cursor, item| {
        if gpus.len() == count {
            gpus.push(GpuBlock::default());
        }
        count += 1;
        block(cursor, item, ticks, wanted, &mut gpus[count - 1])
    })?;
    gpus.truncate(count);
    Ok(())
}

pub(crate) fn batch(cursor: &mut Cursor<'_>, node: &RecordNode, wanted: MetricSet, out: &mut GpuBatch) -> Result<()> {
    out.origin.clear();
    out.labels.clear();
    out.ticks.clear();
    for field in &node.fields {
        match field.name.as_str() {
            "origin" => origin(cursor, &field.node, &mut out.origin)?,
            "labels" => labels(cursor, &field.node, &mut out.labels)?,
            "ticks" => {
                deltas(cursor, &field.node, &mut out.ticks)?;
                if !out.ticks.windows(2).all(|pair| pair[0] < pair[1]) {
                    return Err(DecodeError::Malformed("ticks do not ascend"));
                }
            }
            "gpus" => blocks(cursor, &field.node, wanted, out.ticks.len(), &mut out.gpus)?,
            _ => field.node.skip(cursor)?,
        }
    }
    Ok(())
}

pub(crate) fn event(cursor: &mut Cursor<'_>, node: &RecordNode) -> Result<XidEvent> {
    let mut out = XidEvent::default();
    for field in &node.fields {
        match field.name.as_str() {
            "origin" => origin(cursor, &field.node, &mut out.origin)?,
            "labels" => labels(cursor, &field.node, &mut out.labels)?,
            "kind" => out.kind = EventKind::from_text(symbol(cursor, &field.node)?),
            "code" => out.code = optional_int(cursor, &field.node)?,
            "gpu_uuid" => out.gpu_uuid = optional_text(cursor, &field.node)?,
            "pci" => out.pci = optional_text(cursor, &field.node)?,
            "pid" => out.pid = optional_long(cursor, &field.node)?,
            "process" => out.process = optional_text(cursor, &field.node)?,
            "gpu_instance" => out.gpu_instance = optional_int(cursor, &field.node)?,
            "compute_instance" => out.compute_instance = optional_int(cursor, &field.node)?,
            "job_id" => out.job_id = optional_text(cursor, &field.node)?,
            "message" => out.message = text(cursor, &field.node)?,
            "raw" => out.raw = text(cursor, &field.node)?,
            "kmsg_sequence" => out.kmsg_sequence = optional_long(cursor, &field.node)?,
            "time_estimated" => out.time_estimated = boolean(cursor, &field.node)?,
            _ => field.node.skip(cursor)?,
        }
    }
    Ok(out)
}

pub(crate) fn tick(cursor: &mut Cursor<'_>, node: &RecordNode) -> Result<Tick> {
    let mut out = Tick::default();
    for field in &node.fields {
        match field.name.as_str() {
            "tick_at" => out.tick_at = long(cursor, &field.node)?,
            "writer" => out.writer = text(cursor, &field.node)?,
            _ => field.node.skip(cursor)?,
        }
    }
    Ok(out)
}

fn explained(cursor: &mut Cursor<'_>, node: &Node) -> Result<Explained> {
    let mut out = Explained::default();
    for field in &record(node)?.fields {
        match field.name.as_str() {
            "kind" => out.kind = text(cursor, &field.node)?,
            "code" => out.code = optional_int(cursor, &field.node)?,
            "onset_at" => out.onset_at = long(cursor, &field.node)?,
            "summary" => out.summary = text(cursor, &field.node)?,
            _ => field.node.skip(cursor)?,
        }
    }
    Ok(out)
}

fn evidence(cursor: &mut Cursor<'_>, node: &Node) -> Result<Evidence> {
    let mut out = Evidence::default();
    for field in &record(node)?.fields {
        match field.name.as_str() {
            "at" => out.at = long(cursor, &field.node)?,
            "name" => out.name = text(cursor, &field.node)?,
            "value" => out.value = long(cursor, &field.node)?,
            "before" => out.before = optional_long(cursor, &field.node)?,
            "reset" => out.reset = boolean(cursor, &field.node)?,
            _ => field.node.skip(cursor)?,
        }
    }
    Ok(out)
}

pub(crate) fn incident(cursor: &mut Cursor<'_>, node: &RecordNode) -> Result<Incident> {
    let mut out = Incident::default();
    for field in &node.fields {
        let node = &field.node;
        match field.name.as_str() {
            "id" => out.id = text(cursor, node)?,
            "revision" => out.revision = int(cursor, node)?,
            "kind" => out.kind = text(cursor, node)?,
            "state" => out.state = State::from_text(symbol(cursor, node)?),
            "severity" => out.severity = Severity::from_text(symbol(cursor, node)?),
            "site" => out.site = optional_text(cursor, node)?,
            "rack" => out.rack = optional_text(cursor, node)?,
            "host" => out.host = text(cursor, node)?,
            "gpu_uuid" => out.gpu_uuid = optional_text(cursor, node)?,
            "gpu_index" => out.gpu_index = optional_int(cursor, node)?,
            "pci" => out.pci = optional_text(cursor, node)?,
            "job_id" => out.job_id = optional_text(cursor, node)?,
            "feed" => out.feed = optional_text(cursor, node)?,
            "code" => out.code = optional_int(cursor, node)?,
            "onset_at" => out.onset_at = long(cursor, node)?,
            "end_at" => out.end_at = optional_long(cursor, node)?,
            "decided_at" => out.decided_at = long(cursor, node)?,
            "late" => out.late = boolean(cursor, node)?,
            "statistic" => out.statistic = text(cursor, node)?,
            "value" => out.value = double(cursor, node)?,
            "threshold" => out.threshold = double(cursor, node)?,
            "count" => out.count = long(cursor, node)?,
            "summary" => out.summary = text(cursor, node)?,
            "actions" => out.actions = texts(cursor, node)?,
            "evidence" => items(cursor, node, MAX_ITEMS, |cursor, item| {
                out.evidence.push(evidence(cursor, item)?);
                Ok(())
            })?,
            "explains" => items(cursor, node, MAX_ITEMS, |cursor, item| {
                out.explains.push(explained(cursor, item)?);
                Ok(())
            })?,
            "coverage" => out.coverage = optional_double(cursor, node)?,
            "raw" => out.raw = optional_text(cursor, node)?,
            "log_id" => out.log_id = text(cursor, node)?,
            "topic" => out.topic = text(cursor, node)?,
            "partition" => out.partition = int(cursor, node)?,
            "first_offset" => out.first_offset = long(cursor, node)?,
            "last_offset" => out.last_offset = long(cursor, node)?,
            "detector" => out.detector = text(cursor, node)?,
            "task" => out.task = text(cursor, node)?,
            "emit_seq" => out.emit_seq = long(cursor, node)?,
            _ => node.skip(cursor)?,
        }
    }
    Ok(out)
}
