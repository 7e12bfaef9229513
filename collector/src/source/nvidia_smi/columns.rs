//! The header line of an `nvidia-smi` CSV: which column is what.
//!
//! Knows the fields of `nvidia-smi --help-query-gpu` under their old and new names (drivers 304 to 590). Where several
//! columns tell the same metric, the best comes first in [`Header::order`] and the first with a value counts.

use std::borrow::Cow;

use gpufleet_schemas::metric::Metric;
use gpufleet_schemas::record::PowerKind;

use super::cell::{self, Form};

/// What a column tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Timestamp,
    Host,
    Uuid,
    Index,
    BusId,
    /// The parts of a bus id, where only they were asked for: domain, bus, device.
    BusPart(usize),
    Model,
    Driver,
    Value(Metric, Form),
    Power(PowerKind),
    /// One clocks event reason in words, by its bit.
    Reason(i64),
    /// Describes the board or a setting, not its state.
    Ignored,
    Unknown,
}

pub(super) struct Column {
    /// As the file has it, without its unit.
    pub(super) name: String,
    pub(super) unit: Option<String>,
    pub(super) role: Role,
}

/// A header line, understood.
pub(super) struct Header {
    pub(super) columns: Vec<Column>,
    /// Positions of the columns other than the timestamp, the best of a metric's first.
    pub(super) order: Vec<usize>,
    pub(super) timestamp: Option<usize>,
    /// The line, to know it again.
    cells: Vec<String>,
}

impl Header {
    /// Understands a header line, or says that it is none. In the middle of a file (`current` is the header so far) a
    /// line must be the same again or have a timestamp: a stray word is no header.
    pub(super) fn parse(cells: &[Cow<'_, str>], current: Option<&Header>) -> Option<Header> {
        if cells.iter().any(|cell| cell.starts_with(|c: char| c.is_ascii_digit())) {
            return None;
        }
        let columns: Vec<Column> = cells.iter().map(|cell| column(cell)).collect();
        let timestamp = columns.iter().position(|column| column.role == Role::Timestamp);
        let known = columns.iter().filter(|column| column.role != Role::Unknown).count();
        let same = |header: &Header| header.cells.iter().eq(cells.iter());
        let header = match current {
            Some(current) => timestamp.is_some() || same(current),
            None => timestamp.is_some() || (known > 0 && known * 2 >= columns.len()),
        };
        let mut order: Vec<usize> = (0..columns.len()).filter(|i| columns[*i].role != Role::Timestamp).collect();
        order.sort_by_key(|i| rank(&columns[*i]));
        let cells = cells.iter().map(|cell| cell.to_string()).collect();
        header.then_some(Header { columns, order, timestamp, cells })
    }

    /// Whether the file tells GPUs apart.
    pub(super) fn identifies(&self) -> bool {
        let identity = |role| matches!(role, Role::Uuid | Role::Index | Role::BusId | Role::BusPart(_));
        self.columns.iter().any(|column| identity(column.role))
    }
}

/// Splits a line at its commas; quotes keep a comma, and a doubled quote is one.
pub(super) fn split(line: &str) -> Vec<Cow<'_, str>> {
    let mut cells = Vec::new();
    let mut rest = line;
    loop {
        let start = rest.trim_start();
        if let Some((cell, after)) = start.strip_prefix('"').and_then(quoted) {
            cells.push(cell);
            match after.trim_start().strip_prefix(',') {
                Some(after) => rest = after,
                None if after.trim().is_empty() => return cells,
                // Text after the closing quote: a cell too many, which the caller refuses.
                None => rest = after,
            }
        } else if let Some((cell, after)) = rest.split_once(',') {
            cells.push(Cow::Borrowed(cell.trim()));
            rest = after;
        } else {
            cells.push(Cow::Borrowed(rest.trim()));
            return cells;
        }
    }
}

fn quoted(text: &str) -> Option<(Cow<'_, str>, &str)> {
    let mut at = 0;
    loop {
        at += text.get(at..)?.find('"')?;
        let after = text.get(at + 1..)?;
        if !after.starts_with('"') {
            let cell = text.get(..at)?.trim();
            let cell = if cell.contains('"') { cell.replace("\"\"", "\"").into() } else { cell.into() };
            return Some((cell, after));
        }
        at += 2;
    }
}

/// What the start of a file looks like to this reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// A header line is there.
    Log,
    /// Rows are there and no header.
    NoHeader,
    Other,
}

/// Looks at the start of a file, decoded.
pub(crate) fn look(head: &str) -> Look {
    let mut look = Look::Other;
    for line in head.lines() {
        let cells = split(line);
        // A lone `name` or `count` is a word of any text.
        if Header::parse(&cells, None).is_some_and(|header| header.timestamp.is_some() || cells.len() > 1) {
            return Look::Log;
        }
        let row = |cell: &Cow<'_, str>| {
            cell::has_unit(cell)
                || cell.starts_with("GPU-")
                || cell::timestamp(cell, 0).is_some_and(|_| cell.contains('/'))
        };
        if cells.len() > 1 && cells.iter().any(row) {
            look = Look::NoHeader;
        }
    }
    look
}

fn column(cell: &str) -> Column {
    let (name, unit) = match cell.split_once('[') {
        Some((name, unit)) => (name.trim(), unit.strip_suffix(']')),
        None => (cell.trim(), None),
    };
    let unit = unit.map(str::trim).filter(|unit| !unit.is_empty()).map(str::to_owned);
    Column { name: name.to_owned(), unit, role: role(&name.to_ascii_lowercase()) }
}

/// Lower is better, among the columns of one metric.
fn rank(column: &Column) -> u8 {
    match column.role {
        Role::Power(PowerKind::Instant) => 0,
        Role::Power(PowerKind::AverageOneSecond) => 1,
        Role::Power(PowerKind::Unknown) => 2,
        // What was set, as opposed to what is in force.
        Role::Value(Metric::PowerLimit, _) if column.name.eq_ignore_ascii_case("power.limit") => 1,
        _ => 0,
    }
}

fn role(name: &str) -> Role {
    if let Some(reason) =
        name.strip_prefix("clocks_event_reasons.").or_else(|| name.strip_prefix("clocks_throttle_reasons."))
    {
        return reason_role(reason);
    }
    match name {
        "timestamp" => Role::Timestamp,
        "hostname" => Role::Host,
        "uuid" | "gpu_uuid" => Role::Uuid,
        "index" => Role::Index,
        "pci.bus_id" | "gpu_bus_id" => Role::BusId,
        "pci.domain" => Role::BusPart(0),
        "pci.bus" => Role::BusPart(1),
        "pci.device" => Role::BusPart(2),
        "name" | "gpu_name" => Role::Model,
        "driver_version" => Role::Driver,
        // What it averages over depends on the board.
        "power.draw" => Role::Power(PowerKind::Unknown),
        "power.draw.average" => Role::Power(PowerKind::AverageOneSecond),
        "power.draw.instant" => Role::Power(PowerKind::Instant),
        _ => match value(name) {
            Some((metric, form)) => Role::Value(metric, form),
            None if describes(name) => Role::Ignored,
            None => Role::Unknown,
        },
    }
}

/// Bits of `nvmlClocksEventReasons` in nvml.h.
fn reason_role(reason: &str) -> Role {
    Role::Reason(match reason {
        "active" => return Role::Value(Metric::ClocksEventReasons, Form::Mask),
        "gpu_idle" => 0x1,
        "applications_clocks_setting" | "user_defined_clocks" => 0x2,
        "sw_power_cap" => 0x4,
        "hw_slowdown" => 0x8,
        "sync_boost" => 0x10,
        "sw_thermal_slowdown" => 0x20,
        "hw_thermal_slowdown" => 0x40,
        "hw_power_brake_slowdown" => 0x80,
        "display_clock_setting" | "display_clocks_setting" => 0x100,
        "supported" => return Role::Ignored,
        _ => return Role::Unknown,
    })
}

fn value(name: &str) -> Option<(Metric, Form)> {
    Some(match name {
        "clocks.sm" | "clocks.current.sm" => (Metric::ClockSm, Form::Clock),
        "clocks.mem" | "clocks.current.memory" => (Metric::ClockMemory, Form::Clock),
        "temperature.gpu" => (Metric::TemperatureGpu, Form::Celsius),
        "temperature.memory" => (Metric::TemperatureMemory, Form::Celsius),
        "utilization.gpu" => (Metric::UtilizationGpu, Form::Percent),
        "utilization.memory" => (Metric::UtilizationMemory, Form::Percent),
        "memory.used" => (Metric::MemoryUsed, Form::Memory),
        "memory.total" => (Metric::MemoryTotal, Form::Memory),
        "enforced.power.limit" | "power.limit" => (Metric::PowerLimit, Form::Power),
        "fan.speed" => (Metric::FanSpeed, Form::Percent),
        "pstate" => (Metric::PerformanceState, Form::PState),
        "ecc.errors.corrected.volatile.total" => (Metric::EccSbeVolatile, Form::Count),
        "ecc.errors.uncorrected.volatile.total" => (Metric::EccDbeVolatile, Form::Count),
        "ecc.errors.corrected.aggregate.total" => (Metric::EccSbeAggregate, Form::Count),
        "ecc.errors.uncorrected.aggregate.total" => (Metric::EccDbeAggregate, Form::Count),
        "remapped_rows.correctable" => (Metric::RowRemapCorrected, Form::Count),
        "remapped_rows.uncorrectable" => (Metric::RowRemapUncorrected, Form::Count),
        "remapped_rows.pending" => (Metric::RowRemapPending, Form::Flag),
        "remapped_rows.failure" => (Metric::RowRemapFailed, Form::Flag),
        "pcie.link.gen.current" | "pcie.link.gen.gpucurrent" => (Metric::PcieLinkGen, Form::Count),
        "pcie.link.width.current" | "pcie.link.width.gpucurrent" => (Metric::PcieLinkWidth, Form::Count),
        _ => return None,
    })
}

/// Fields that say what a board is or how it is set up. Leaving them out loses no reading.
fn describes(name: &str) -> bool {
    const FAMILIES: &[&str] = &[
        "pci.",
        "pcie.link.gen.",
        "pcie.link.width.",
        "display_",
        "accounting.",
        "driver_model.",
        "inforom.",
        "gom.",
        "ecc.mode.",
        "mig.mode.",
        "gsp.mode.",
        "clocks.max.",
        "clocks.applications.",
        "clocks.default_applications.",
        "platform.",
    ];
    const FIELDS: &[&str] = &[
        "count",
        "serial",
        "gpu_serial",
        "vbios_version",
        "persistence_mode",
        "addressing_mode",
        "compute_mode",
        "compute_cap",
        "c2c.mode",
        "power.management",
        "power.default_limit",
        "power.min_limit",
        "power.max_limit",
    ];
    FIELDS.contains(&name) || FAMILIES.iter().any(|family| name.starts_with(family))
}
