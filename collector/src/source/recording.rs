//! Recorded files, as one source: nvidia-smi CSV logs and kernel logs of any number of hosts, merged by time.
//!
//! Takes paths; tells each file's kind by its start and its identity by its content, so that the same file gives the
//! same records whenever and wherever it is read. What was left out of a file travels in `origin.lost` of its next
//! record, at the latest in an empty batch after the last one. `-` is a kernel log on stdin.
//!
//! Deliberately absent: packed files are not unpacked, and a file that grows meanwhile is read up to where it ended when
//! it was opened. Clocks of different hosts are not aligned.

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt::{Display, Formatter, Write as _};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Take};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use gpufleet_schemas::instant::{self, DAY};
use gpufleet_schemas::record::{GpuBatch, Labels, Lost, Origin, Telemetry, XidEvent};
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::kernel_log_file::{self, Contents};
use super::nvidia_smi::{self, Look, Reader};
use super::{Losses, Source, SourceError};
use crate::kernel_log::{Clock, looks_like_kernel_log};
use crate::text::Lines;

/// How much of a file decides on its kind.
const HEAD_BYTES: usize = 64 * 1024;
/// Stands for stdin among the paths.
const STDIN: &str = "-";

/// What files do not say themselves.
#[derive(Clone, Debug, Default)]
pub struct RecordingOptions {
    /// Host of files that name none; else it is the file's name without its ending.
    pub host: Option<String>,
    /// Local time minus UTC.
    pub tz_offset_seconds: i32,
    /// Year of the first stamp that has none; else that of the file's last change.
    pub year: Option<i32>,
    pub labels: Labels,
    /// Makes the files' identities new, so that they can be imported once more.
    pub salt: Option<String>,
}

/// What a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    NvidiaSmi,
    KernelLog,
}

impl Display for FileKind {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            FileKind::NvidiaSmi => "nvidia-smi log",
            FileKind::KernelLog => "kernel log",
        })
    }
}

/// A file, and what came of it so far.
#[derive(Clone, Debug)]
pub struct FileSummary {
    pub path: PathBuf,
    pub kind: FileKind,
    /// That of its first record.
    pub host: String,
    /// `file:` and the start of the content's SHA-256, with the salt if any.
    pub boot_id: String,
    /// Samples.
    pub rows: u64,
    pub events: u64,
    /// Everything that was left out, by reason, with the first of each named.
    pub losses: Vec<Lost>,
}

/// The files as a source.
pub struct Recording {
    files: Vec<Opened>,
    summaries: Vec<FileSummary>,
    /// The next record of each file that has one, by instant and position.
    heads: BinaryHeap<Reverse<(i64, usize)>>,
}

struct Opened {
    body: Body,
    next: Option<Telemetry>,
    labels: Labels,
    seq: i64,
    last_at: i64,
    losses: Losses,
}

enum Body {
    NvidiaSmi(Box<Reader<BufReader<Take<File>>>>),
    KernelLog(std::vec::IntoIter<XidEvent>),
}

impl Recording {
    /// Opens all files and reads each up to its first record.
    pub fn open(paths: &[PathBuf], options: &RecordingOptions) -> Result<Recording, SourceError> {
        let mut recording = Recording { files: Vec::new(), summaries: Vec::new(), heads: BinaryHeap::new() };
        for (i, path) in paths.iter().enumerate() {
            let (file, summary) = Opened::open(path, options)?;
            recording.files.push(file);
            recording.summaries.push(summary);
            recording.pull(i)?;
            let (added, earlier) = (&recording.summaries[i], &recording.summaries[..i]);
            if let Some(same) = earlier.iter().find(|file| file.boot_id == added.boot_id && file.host == added.host) {
                return Err(SourceError::SameContent {
                    first: same.path.clone(),
                    second: path.clone(),
                    host: added.host.clone(),
                });
            }
        }
        Ok(recording)
    }

    /// The files, in the order of the paths, and what came of them so far.
    pub fn files(&self) -> &[FileSummary] {
        &self.summaries
    }

    /// What came of the files; complete after the last record.
    pub fn summary(&self) -> Vec<FileSummary> {
        self.summaries.clone()
    }

    /// Makes the next record of a file ready.
    fn pull(&mut self, i: usize) -> Result<(), SourceError> {
        let (file, summary) = (&mut self.files[i], &mut self.summaries[i]);
        let Some(mut record) = file.pull(&summary.host)? else { return Ok(()) };
        let first = file.seq == 0;
        let origin = match &mut record {
            Telemetry::Batch(batch) => {
                summary.rows += batch.sample_count() as u64;
                &mut batch.origin
            }
            Telemetry::Event(event) => {
                summary.events += 1;
                &mut event.origin
            }
            Telemetry::Tick(_) | Telemetry::Topology(_) => return Ok(()),
        };
        origin.boot_id.clone_from(&summary.boot_id);
        env!("CARGO_PKG_VERSION").clone_into(&mut origin.collector_version);
        origin.seq = file.seq;
        origin.lost = file.losses.take();
        file.seq += 1;
        if first {
            summary.host.clone_from(&origin.host);
        }
        let mut all = Losses::default();
        all.merge(&summary.losses);
        all.merge(&origin.lost);
        summary.losses = all.take();
        self.heads.push(Reverse((origin.observed_at, i)));
        file.next = Some(record);
        Ok(())
    }
}

impl Source for Recording {
    fn next(&mut self) -> Result<Option<Telemetry>, SourceError> {
        let Some(Reverse((_, i))) = self.heads.pop() else { return Ok(None) };
        let record = self.files[i].next.take();
        self.pull(i)?;
        Ok(record)
    }
}

impl Opened {
    fn open(path: &Path, options: &RecordingOptions) -> Result<(Opened, FileSummary), SourceError> {
        let stdin = path.as_os_str() == STDIN;
        let name = if stdin { "stdin".to_owned() } else { path.display().to_string() };
        let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        let stem = stem.filter(|_| !stdin).unwrap_or_else(|| "stdin".to_owned());
        let file = Opening { name, host: options.host.clone().unwrap_or(stem), options };
        let (body, losses, hash, last_at) = if stdin { file.stdin() } else { file.file(path) }?;
        let kind = match body {
            Body::NvidiaSmi(_) => FileKind::NvidiaSmi,
            Body::KernelLog(_) => FileKind::KernelLog,
        };
        let salt = options.salt.as_ref().map_or(String::new(), |salt| format!("+{salt}"));
        let summary = FileSummary {
            path: path.to_owned(),
            kind,
            host: file.host,
            boot_id: format!("file:{hash}{salt}"),
            rows: 0,
            events: 0,
            losses: Vec::new(),
        };
        Ok((Opened { body, next: None, labels: options.labels.clone(), seq: 0, last_at, losses }, summary))
    }

    /// The next record; after the last one, an empty batch if something was lost since.
    fn pull(&mut self, host: &str) -> Result<Option<Telemetry>, SourceError> {
        let record = match &mut self.body {
            Body::KernelLog(events) => events.next().map(Telemetry::Event),
            Body::NvidiaSmi(reader) => {
                let record = reader.next().transpose()?;
                self.losses.merge(&reader.take_losses());
                record
            }
        };
        if let Some(record) = record {
            self.last_at = record.newest_at();
            return Ok(Some(record));
        }
        if self.losses.as_slice().is_empty() {
            return Ok(None);
        }
        let origin = Origin { host: host.to_owned(), observed_at: self.last_at, ..Origin::default() };
        Ok(Some(Telemetry::Batch(GpuBatch { origin, labels: self.labels.clone(), ..GpuBatch::default() })))
    }
}

/// A body, what was lost of it already, the content's hash, and the instant to use where no record has one.
type Found = (Body, Losses, String, i64);

/// A file on the way to be open.
struct Opening<'a> {
    name: String,
    host: String,
    options: &'a RecordingOptions,
}

impl Opening<'_> {
    fn file(&self, path: &Path) -> Result<Found, SourceError> {
        let problem = |error: std::io::Error| SourceError::unreadable(&self.name, &error);
        // A device or a pipe may never end, and a file is read twice.
        if !std::fs::metadata(path).map_err(problem)?.is_file() {
            return Err(problem(std::io::Error::other("it is no regular file")));
        }
        let mut input = Hashing::new(File::open(path).map_err(problem)?);
        let modified = input.inner.metadata().and_then(|metadata| metadata.modified()).map_or(0, micros);
        let head = input.finish().map_err(problem)?;
        let body =
            || -> Result<_, SourceError> { Ok(BufReader::new(File::open(path).map_err(problem)?.take(input.bytes))) };
        let head = text(&head).map_err(problem)?;
        let look = nvidia_smi::look(&head);
        let (body, losses) = if look == Look::Log {
            let options = nvidia_smi::Options {
                name: self.name.clone(),
                host: self.host.clone(),
                labels: self.options.labels.clone(),
                tz_offset_seconds: self.options.tz_offset_seconds,
            };
            (Body::NvidiaSmi(Box::new(Reader::new(body()?, options)?)), Losses::default())
        } else if looks_like_kernel_log(&head) {
            let mut contents = self.kernel_log(body()?, modified, 0)?;
            let newest = contents.events.last().map_or(0, |event| event.origin.observed_at);
            // A log is not younger than its file: it began in the year before.
            if self.options.year.is_none() && newest > modified.saturating_add(DAY) {
                contents = self.kernel_log(body()?, modified, 1)?;
            }
            (Body::KernelLog(contents.events.into_iter()), contents.losses)
        } else if look == Look::NoHeader {
            return Err(SourceError::NoHeader { name: self.name.clone() });
        } else {
            return Err(SourceError::UnknownContent { name: self.name.clone() });
        };
        Ok((body, losses, input.hash(), modified))
    }

    /// Stdin cannot be read twice, so it is not looked at first; its end is now.
    fn stdin(&self) -> Result<Found, SourceError> {
        let now = micros(SystemTime::now());
        let mut input = Hashing::new(std::io::stdin());
        let contents = self.kernel_log(BufReader::new(&mut input), now, 0)?;
        Ok((Body::KernelLog(contents.events.into_iter()), contents.losses, input.hash(), now))
    }

    fn kernel_log(&self, input: impl BufRead, ends_at: i64, years_back: i32) -> Result<Contents, SourceError> {
        let local = ends_at.saturating_add(i64::from(self.options.tz_offset_seconds) * instant::SECOND);
        let year = instant::text(local).get(..4).and_then(|year| year.parse::<i32>().ok()).unwrap_or(1970);
        let clock = Clock {
            tz_offset_seconds: self.options.tz_offset_seconds,
            year: self.options.year.unwrap_or(year - years_back),
            ends_at_micros: Some(ends_at),
            boot_at_micros: None,
        };
        kernel_log_file::read(input, &self.name, &clock, &self.host, &self.options.labels)
            .map_err(|error| SourceError::unreadable(&self.name, &error))
    }
}

fn micros(time: SystemTime) -> i64 {
    time.duration_since(UNIX_EPOCH).ok().and_then(|span| i64::try_from(span.as_micros()).ok()).unwrap_or(0)
}

/// The start of a file as text, without the line that its end cuts.
fn text(head: &[u8]) -> std::io::Result<String> {
    let mut text = String::new();
    let mut lines = Lines::new(head)?;
    while let Some(line) = lines.next()? {
        if line.ended || head.len() < HEAD_BYTES {
            text.push_str(&line.text);
            text.push('\n');
        }
    }
    Ok(text)
}

/// Hashes and counts what is read through it.
struct Hashing<R> {
    inner: R,
    hasher: Sha256,
    bytes: u64,
}

impl<R: Read> Hashing<R> {
    fn new(inner: R) -> Hashing<R> {
        Hashing { inner, hasher: Sha256::new(), bytes: 0 }
    }

    /// Reads to the end; gives the first [`HEAD_BYTES`].
    fn finish(&mut self) -> std::io::Result<Vec<u8>> {
        let mut head = Vec::new();
        self.take(HEAD_BYTES as u64).read_to_end(&mut head)?;
        std::io::copy(self, &mut std::io::sink())?;
        Ok(head)
    }

    /// The first 16 hexadecimal digits of the SHA-256.
    fn hash(self) -> String {
        self.hasher.finalize().iter().take(8).fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.hasher.update(&buffer[..count]);
        self.bytes += count as u64;
        Ok(count)
    }
}
