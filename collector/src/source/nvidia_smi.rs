//! CSV logs of `nvidia-smi --query-gpu`, as people have them.
//!
//! Takes the bytes of a file in any encoding, with any columns in any order, under old and new names, with units in the
//! cells, in the header or nowhere; gives batches and, where the driver says that a GPU is lost, an event at the
//! transition. Whatever is left out is counted with the first of its kind named ([`Reader::take_losses`]): each line
//! that is not blank is a header, a row, or counted. Memory is bounded by a line and a batch.
//!
//! Deliberately absent: a metric that the file does not have is not worked out from others, and columns are not guessed
//! where no header names them. Identity across files and sequence numbers are [`super::recording`]'s.

mod batch;
mod cell;
mod columns;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::{BTreeSet, HashSet, VecDeque};
use std::io::BufRead;

use gpufleet_schemas::metric::{METRIC_COUNT, Metric, Width};
use gpufleet_schemas::record::{EventKind, Labels, Lost, LostReason, Origin, PowerKind, Telemetry, XidEvent};

use super::{Losses, SourceError};
use crate::kernel_log::pci_address;
use crate::text::{Line, Lines, MAX_LINE_BYTES};
use batch::{Gpu, MAX_GPUS, Pending, Row, Values};
use cell::Cell;
use columns::{Column, Header, Role};
pub(crate) use columns::{Look, look};

/// Longest cell that a message repeats, in characters.
const MAX_QUOTED: usize = 40;
/// Longest identity that is believed.
const MAX_IDENTITY: usize = 128;
/// Distinct names of unknown columns that are remembered.
const MAX_UNKNOWN: usize = 4096;

/// What a file does not say itself.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Names the file in messages.
    pub name: String,
    /// Host of rows that name none.
    pub host: String,
    pub labels: Labels,
    /// Local time minus UTC.
    pub tz_offset_seconds: i32,
}

/// Where the lines of a file went; those that are missing here are losses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Lines that are not blank.
    pub lines: u64,
    pub headers: u64,
    pub rows: u64,
}

/// Reads one file: an iterator of batches and events, whose origins have host and instant only.
pub struct Reader<R> {
    lines: Lines<R>,
    options: Options,
    header: Option<Header>,
    /// A line that may be torn: it is if a header or nothing follows it.
    doubtful: Option<Line>,
    /// The last row's last cell had a unit.
    unit_last: bool,
    known: Vec<Gpu>,
    lost: HashSet<(String, String)>,
    driver: Option<String>,
    unknown_columns: BTreeSet<String>,
    pending: Pending,
    events: Vec<XidEvent>,
    ready: VecDeque<Telemetry>,
    losses: Losses,
    counts: Counts,
    ended: bool,
}

/// What a row's cells say, before anyone asks whose they are.
struct Cells {
    values: Values,
    power_kind: Option<PowerKind>,
    host: Option<String>,
    uuid: Option<String>,
    index: Option<i32>,
    pci: Option<String>,
    model: Option<String>,
    lost: bool,
    /// Columns with a cell that says nothing that can be read.
    unreadable: Vec<usize>,
}

impl<R: BufRead> Reader<R> {
    pub fn new(input: R, options: Options) -> Result<Reader<R>, SourceError> {
        let lines = Lines::new(input).map_err(|error| SourceError::unreadable(&options.name, &error))?;
        Ok(Reader {
            lines,
            options,
            header: None,
            doubtful: None,
            unit_last: false,
            known: Vec::new(),
            lost: HashSet::new(),
            driver: None,
            unknown_columns: BTreeSet::new(),
            pending: Pending::default(),
            events: Vec::new(),
            ready: VecDeque::new(),
            losses: Losses::default(),
            counts: Counts::default(),
            ended: false,
        })
    }

    /// What was left out since the last call.
    pub fn take_losses(&mut self) -> Vec<Lost> {
        self.losses.take()
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    fn advance(&mut self) -> Result<(), SourceError> {
        let line = self.lines.next().map_err(|error| SourceError::unreadable(&self.options.name, &error))?;
        match line {
            Some(line) if line.text.trim().is_empty() => {}
            Some(line) => self.line(&line),
            None => {
                self.ended = true;
                self.settle(true);
                self.flush();
                if self.header.is_none() && self.counts.lines > 0 {
                    return Err(SourceError::NoHeader { name: self.options.name.clone() });
                }
            }
        }
        Ok(())
    }

    fn line(&mut self, line: &Line) {
        self.counts.lines += 1;
        if line.cut {
            self.settle(false);
            return self.lose(LostReason::CutLine, line.number, || format!("longer than {MAX_LINE_BYTES} bytes"));
        }
        let cells = columns::split(&line.text);
        let header = Header::parse(&cells, self.header.as_ref());
        self.settle(header.is_some());
        match (header, self.header.take()) {
            (Some(_), Some(current)) if !line.ended => {
                self.header = Some(current);
                self.lose(LostReason::CutLine, line.number, || "the file ends within it".to_owned());
            }
            (Some(header), _) => self.begin(header, line.number),
            (None, Some(header)) => {
                self.row(&header, line, &cells);
                self.header = Some(header);
            }
            (None, None) => {
                self.lose(LostReason::UnreadableLine, line.number, || "no header names its columns".to_owned())
            }
        }
    }

    /// Begins with the columns of a header.
    fn begin(&mut self, header: Header, line: u64) {
        self.counts.headers += 1;
        self.flush();
        self.unit_last = false;
        for column in header.columns.iter().filter(|column| column.role == Role::Unknown) {
            if self.unknown_columns.len() < MAX_UNKNOWN && self.unknown_columns.insert(column.name.to_ascii_lowercase())
            {
                let name = &self.options.name;
                self.losses.add(LostReason::UnknownColumn, 1, || format!("{name}:{line} {}", shown(&column.name)));
            }
        }
        self.header = Some(header);
    }

    fn row(&mut self, header: &Header, line: &Line, cells: &[Cow<'_, str>]) {
        let count = header.columns.len();
        let (cells, surplus) = cells.split_at(count.min(cells.len()));
        if surplus.iter().any(|cell| !cell.is_empty()) {
            return self.lose(LostReason::UnreadableLine, line.number, || {
                format!("{} cells for {count} columns", cells.len() + surplus.len())
            });
        }
        let last = cells.last().map_or("", |cell| cell.as_ref());
        if !line.ended && (cells.len() < count || !cell::whole(last)) {
            return self.lose(LostReason::CutLine, line.number, || "the file ends within it".to_owned());
        }
        if cells.len() < count || (self.unit_last && cell::bare_number(last)) {
            self.doubtful = Some(line.clone());
            return;
        }
        self.whole_row(header, line, cells);
    }

    fn whole_row(&mut self, header: &Header, line: &Line, cells: &[Cow<'_, str>]) {
        self.unit_last = cells.last().is_some_and(|cell| cell::has_unit(cell));
        if let Err(problem) = self.try_row(header, line, cells) {
            self.lose(LostReason::UnreadableLine, line.number, || problem);
        }
    }

    fn try_row(&mut self, header: &Header, line: &Line, cells: &[Cow<'_, str>]) -> Result<(), String> {
        let Some(stamp) = header.timestamp else {
            return Err("no timestamp column, so nothing says when".to_owned());
        };
        let stamp = &cells[stamp];
        let at = cell::timestamp(stamp, self.options.tz_offset_seconds)
            .ok_or_else(|| format!("timestamp \"{}\" is no time", shown(stamp)))?;
        let mut found = self.read(header, cells);
        let gpu = self.gpu(header, &mut found)?;
        let reading = found.values.iter().any(Option::is_some);
        self.counts.rows += 1;
        for i in found.unreadable {
            let (name, column) = (&self.options.name, &header.columns[i].name);
            self.losses.add(LostReason::UnreadableCell, 1, || {
                format!("{name}:{} {column} \"{}\"", line.number, shown(&cells[i]))
            });
        }
        let key = (gpu.host.clone(), gpu.identity.clone());
        let event = if found.lost {
            self.lost.insert(key).then(|| self.lost_event(&gpu, at, &line.text))
        } else {
            if reading {
                self.lost.remove(&key);
            }
            None
        };
        let row = Row { at, gpu, driver: self.driver.clone(), power_kind: found.power_kind, values: found.values };
        if !self.pending.fits(&row) {
            self.flush();
        }
        self.pending.add(row);
        self.events.extend(event);
        Ok(())
    }

    /// Reads every cell but the timestamp.
    fn read(&mut self, header: &Header, cells: &[Cow<'_, str>]) -> Cells {
        let mut found = Cells::new();
        let (mut mask, mut bus) = (None, [None; 3]);
        for &i in &header.order {
            let column = &header.columns[i];
            let text = match Cell::of(&cells[i]) {
                Cell::Lost => {
                    found.lost = true;
                    continue;
                }
                Cell::Absent => continue,
                Cell::Text(text) => text,
            };
            let readable = match column.role {
                Role::Value(..) | Role::Power(_) => found.value(column, text),
                Role::Reason(bit) => match cell::active(text) {
                    Some(active) => {
                        mask = Some(mask.unwrap_or(0) | if active { bit } else { 0 });
                        true
                    }
                    None => false,
                },
                Role::Host => keep(&mut found.host, name(text)),
                Role::Uuid => keep(&mut found.uuid, name(text).filter(|text| !text.contains(' '))),
                Role::Index => keep(&mut found.index, text.parse().ok().filter(|index| *index >= 0)),
                Role::BusId => keep(&mut found.pci, pci_address(text)),
                Role::BusPart(part) => keep(&mut bus[part], bus_part(text)),
                Role::Model => keep(&mut found.model, name(text)),
                Role::Driver => keep(&mut self.driver, name(text)),
                Role::Timestamp | Role::Ignored | Role::Unknown => true,
            };
            if !readable {
                found.unreadable.push(i);
            }
        }
        // The driver's own mask has bits that no word column was asked for.
        let reasons = &mut found.values[Metric::ClocksEventReasons.index()];
        *reasons = reasons.or(mask);
        if let (None, Some(at)) = (&found.pci, bus[1]) {
            found.pci = Some(format!("{:08x}:{at:02x}:{:02x}", bus[0].unwrap_or(0), bus[2].unwrap_or(0)));
        }
        found
    }

    /// Whose row it is, with what earlier rows told of the GPU.
    fn gpu(&mut self, header: &Header, found: &mut Cells) -> Result<Gpu, String> {
        let host = found.host.take().unwrap_or_else(|| self.options.host.clone());
        let by_uuid = header.columns.iter().any(|column| column.role == Role::Uuid);
        let of_host = |gpu: &&Gpu| gpu.host == host;
        let identity = match (found.uuid.take(), found.index, &found.pci) {
            (Some(uuid), _, _) => uuid,
            // A lost GPU may not even tell its uuid; its place does.
            (None, index, pci) => {
                let place = |gpu: &&Gpu| match pci {
                    Some(_) => gpu.pci == *pci,
                    None => index.is_some() && gpu.index == index,
                };
                let known = self.known.iter().filter(of_host).rfind(place).filter(|_| by_uuid);
                match (known, index, pci) {
                    (Some(known), _, _) => known.identity.clone(),
                    (None, Some(index), _) => format!("{host}#{index}"),
                    (None, None, Some(pci)) => pci.clone(),
                    (None, None, None) if !header.identifies() => format!("{host}#0"),
                    _ => return Err("no readable uuid, index or bus id, so nothing says which GPU".to_owned()),
                }
            }
        };
        let known = self.known.iter_mut().find(|gpu| gpu.host == host && gpu.identity == identity);
        let told = Gpu { host, identity, index: found.index, pci: found.pci.take(), model: found.model.take() };
        let Some(known) = known else {
            if self.known.len() >= MAX_GPUS {
                return Err(format!("more than {MAX_GPUS} GPUs in one file"));
            }
            self.known.push(told.clone());
            return Ok(told);
        };
        known.index = told.index.or(known.index);
        known.pci = told.pci.or_else(|| known.pci.take());
        known.model = told.model.or_else(|| known.model.take());
        Ok(known.clone())
    }

    fn lost_event(&self, gpu: &Gpu, at: i64, raw: &str) -> XidEvent {
        let driver_version = self.driver.clone().or_else(|| self.options.labels.driver_version.clone());
        XidEvent {
            origin: Origin { host: gpu.host.clone(), observed_at: at, ..Origin::default() },
            labels: Labels { driver_version, ..self.options.labels.clone() },
            kind: EventKind::GpuLost,
            gpu_uuid: Some(gpu.identity.clone()),
            pci: gpu.pci.clone(),
            message: "GPU is lost".to_owned(),
            raw: raw.to_owned(),
            ..XidEvent::default()
        }
    }

    /// Hands over the rows so far as a batch, then the events among them: none is older than the batch.
    fn flush(&mut self) {
        self.ready.extend(self.pending.take(&self.options.labels).map(Telemetry::Batch));
        self.ready.extend(self.events.drain(..).map(Telemetry::Event));
    }

    /// Says what the doubtful line was, now that what follows it is known.
    fn settle(&mut self, torn: bool) {
        let Some(line) = self.doubtful.take() else { return };
        let Some(header) = self.header.take() else { return };
        let cells = columns::split(&line.text);
        let cells = &cells[..cells.len().min(header.columns.len())];
        if torn {
            self.lose(LostReason::CutLine, line.number, || "it ends before its last cell does".to_owned());
        } else if cells.len() < header.columns.len() {
            self.lose(LostReason::UnreadableLine, line.number, || {
                format!("{} cells for {} columns", cells.len(), header.columns.len())
            });
        } else {
            // Someone went on with `nounits`.
            self.whole_row(&header, &line, cells);
        }
        self.header = Some(header);
    }

    fn lose(&mut self, reason: LostReason, line: u64, why: impl FnOnce() -> String) {
        let name = &self.options.name;
        self.losses.add(reason, 1, || format!("{name}:{line} {}", why()));
    }
}

impl<R: BufRead> Iterator for Reader<R> {
    type Item = Result<Telemetry, SourceError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(record) = self.ready.pop_front() {
                return Some(Ok(record));
            }
            if self.ended {
                return None;
            }
            if let Err(error) = self.advance() {
                self.ended = true;
                return Some(Err(error));
            }
        }
    }
}

impl Cells {
    fn new() -> Cells {
        Cells {
            values: [None; METRIC_COUNT],
            power_kind: None,
            host: None,
            uuid: None,
            index: None,
            pci: None,
            model: None,
            lost: false,
            unreadable: Vec::new(),
        }
    }

    /// Reads a metric's cell, unless a better column has told the metric; says whether it could be read.
    fn value(&mut self, column: &Column, text: &str) -> bool {
        let (metric, form, kind) = match column.role {
            Role::Value(metric, form) => (metric, form, None),
            Role::Power(kind) => (Metric::PowerDraw, cell::Form::Power, Some(kind)),
            _ => return true,
        };
        let Some(value) = form.parse(text, column.unit.as_deref()).filter(|value| holds(metric.width(), *value)) else {
            return false;
        };
        let place = &mut self.values[metric.index()];
        if place.is_none() {
            *place = Some(value);
            self.power_kind = kind.or(self.power_kind);
        }
        true
    }
}

/// Whether a metric's column has room for a value.
fn holds(width: Width, value: i64) -> bool {
    width == Width::Long || i32::try_from(value).is_ok()
}

/// Keeps what was read; says whether anything was.
fn keep<T>(place: &mut Option<T>, read: Option<T>) -> bool {
    let readable = read.is_some();
    if readable {
        *place = read;
    }
    readable
}

fn name(text: &str) -> Option<String> {
    (text.len() <= MAX_IDENTITY && !text.contains(char::REPLACEMENT_CHARACTER)).then(|| text.to_owned())
}

/// `0x1B`, or the digits alone.
fn bus_part(text: &str) -> Option<u32> {
    let digits = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")).unwrap_or(text);
    u32::from_str_radix(digits, 16).ok().filter(|_| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// The start of a cell, for a message.
fn shown(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(MAX_QUOTED) {
        Some((end, _)) => format!("{}...", &text[..end]).into(),
        None => text.into(),
    }
}
