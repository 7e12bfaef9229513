//! The wire: records to framed Avro bytes and back.
//!
//! Framing is Avro single-object encoding (0xC3 0x01, then the CRC-64-AVRO fingerprint of the writer's schema, little
//! endian). Every released schema file is embedded, so that a reader needs no registry; bytes that name a schema it
//! does not know are refused by name, never guessed at. Decoding reuses what the last record allocated.

mod bytes;
mod canonical;
mod decode;
mod encode;
mod schema;

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use apache_avro::Schema;

use crate::metric::MetricSet;
use crate::record::{GpuBatch, Incident, Telemetry, Tick, Topology, Upstream, XidEvent};
use bytes::Cursor;
use canonical::fingerprint;
use schema::RecordNode;

/// Larger records are refused unread: a broker's default limit is 1 MiB.
pub const MAX_RECORD_BYTES: usize = 1 << 20;
const MAGIC: [u8; 2] = [0xC3, 0x01];
const HEADER_BYTES: usize = 10;

/// The years 2000 to 2199, microseconds: an instant outside of them is no time, and every reader may calculate with one
/// inside of them.
const PLAUSIBLE: std::ops::Range<i64> = 946_684_800_000_000..7_258_118_400_000_000;
const IMPLAUSIBLE: DecodeError = DecodeError::Malformed("an instant lies outside of the years 2000 to 2199");

/// The released schema files, newest last within each record. They are never edited (`schemas/README.md`).
pub const RELEASED: &[(&str, &str)] = &[
    ("gpu_batch.v1", include_str!("../avro/gpu_batch.v1.avsc")),
    ("xid_event.v1", include_str!("../avro/xid_event.v1.avsc")),
    ("tick.v1", include_str!("../avro/tick.v1.avsc")),
    ("incident.v1", include_str!("../avro/incident.v1.avsc")),
    ("incident.v2", include_str!("../avro/incident.v2.avsc")),
    ("topology.v1", include_str!("../avro/topology.v1.avsc")),
    ("epoch.v1", include_str!("../avro/epoch.v1.avsc")),
    ("partial.v1", include_str!("../avro/partial.v1.avsc")),
    ("watermark.v1", include_str!("../avro/watermark.v1.avsc")),
    ("exclusion.v1", include_str!("../avro/exclusion.v1.avsc")),
];

/// Why bytes are no record. [`DecodeError::reason`] is the word that counters, the dead-letter topic and `losses` use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("the record is empty")]
    Empty,
    #[error("the record is larger than {MAX_RECORD_BYTES} bytes")]
    TooLarge,
    #[error("the record does not start with Avro's single-object mark")]
    Foreign,
    #[error("the record was written with schema {0:016x}, which this version does not know; upgrade the reader first")]
    UnknownSchema(u64),
    #[error("the record is a {0}, which does not belong here")]
    WrongType(String),
    #[error("the record ends in the middle of a value")]
    Truncated,
    #[error("the record goes on after its last field")]
    TrailingBytes,
    #[error("the record is malformed: {0}")]
    Malformed(&'static str),
}

impl DecodeError {
    pub fn reason(&self) -> &'static str {
        match self {
            DecodeError::Empty => "empty",
            DecodeError::TooLarge => "too_large",
            DecodeError::Foreign => "foreign",
            DecodeError::UnknownSchema(_) => "unknown_schema",
            DecodeError::WrongType(_) => "wrong_type",
            DecodeError::Truncated => "truncated",
            DecodeError::TrailingBytes => "trailing_bytes",
            DecodeError::Malformed(_) => "malformed",
        }
    }
}

/// Writes records with the newest released schema of their type.
#[derive(Clone, Debug)]
pub struct Encoder {
    batch: [u8; HEADER_BYTES],
    event: [u8; HEADER_BYTES],
    tick: [u8; HEADER_BYTES],
    topology: [u8; HEADER_BYTES],
    incident: [u8; HEADER_BYTES],
    partial: [u8; HEADER_BYTES],
    watermark: [u8; HEADER_BYTES],
    exclusion: [u8; HEADER_BYTES],
    epoch: [u8; HEADER_BYTES],
}

impl Default for Encoder {
    fn default() -> Encoder {
        // Fingerprints are worked out once a process.
        static ENCODER: OnceLock<Encoder> = OnceLock::new();
        ENCODER.get_or_init(Encoder::new).clone()
    }
}

impl Encoder {
    fn new() -> Encoder {
        let header = |name: &str| {
            let mut header = [0u8; HEADER_BYTES];
            header[..2].copy_from_slice(&MAGIC);
            let newest =
                RELEASED.iter().rev().find(|(file, _)| file.split_once('.').is_some_and(|(stem, _)| stem == name));
            let print = newest.and_then(|(_, text)| fingerprint(text).ok());
            let print = print.expect("a released schema has a fingerprint; a test holds that");
            header[2..].copy_from_slice(&print.to_le_bytes());
            header
        };
        Encoder {
            batch: header("gpu_batch"),
            event: header("xid_event"),
            tick: header("tick"),
            topology: header("topology"),
            incident: header("incident"),
            partial: header("partial"),
            watermark: header("watermark"),
            exclusion: header("exclusion"),
            epoch: header("epoch"),
        }
    }
}

impl Encoder {
    /// Appends nothing to what `out` held: it is cleared first.
    pub fn telemetry(&self, record: &Telemetry, out: &mut Vec<u8>) {
        out.clear();
        out.extend_from_slice(match record {
            Telemetry::Batch(_) => &self.batch,
            Telemetry::Event(_) => &self.event,
            Telemetry::Tick(_) => &self.tick,
            Telemetry::Topology(_) => &self.topology,
        });
        encode::put_telemetry(out, record);
    }

    pub fn incident(&self, incident: &Incident, out: &mut Vec<u8>) {
        out.clear();
        out.extend_from_slice(&self.incident);
        encode::put_incident(out, incident);
    }

    pub fn upstream(&self, record: &Upstream, out: &mut Vec<u8>) {
        out.clear();
        out.extend_from_slice(match record {
            Upstream::Partial(_) => &self.partial,
            Upstream::Watermark(_) => &self.watermark,
            Upstream::Exclusion(_) => &self.exclusion,
            Upstream::Topology { .. } => &self.epoch,
        });
        encode::put_upstream(out, record);
    }
}

/// What a telemetry record turned out to be; a batch lies in the decoder's own memory.
#[derive(Debug)]
pub enum Decoded<'d> {
    Batch(&'d GpuBatch),
    Event(XidEvent),
    Tick(Tick),
    Topology(Topology),
}

/// Reads records of every schema it knows.
#[derive(Debug)]
pub struct Decoder {
    writers: BTreeMap<u64, Arc<RecordNode>>,
    wanted: MetricSet,
    batch: GpuBatch,
}

impl Default for Decoder {
    fn default() -> Decoder {
        Decoder::wanting(MetricSet::ALL)
    }
}

impl Decoder {
    /// A decoder that steps over the metrics that nobody asked for.
    pub fn wanting(wanted: MetricSet) -> Decoder {
        // The released schemas are compiled once a process.
        static WRITERS: OnceLock<BTreeMap<u64, Arc<RecordNode>>> = OnceLock::new();
        let writers = WRITERS.get_or_init(|| {
            let mut decoder = Decoder { writers: BTreeMap::new(), wanted, batch: GpuBatch::default() };
            for (name, text) in RELEASED {
                let learned = decoder.learn(text);
                debug_assert!(learned.is_ok(), "{name}: {learned:?}");
            }
            decoder.writers
        });
        Decoder { writers: writers.clone(), wanted, batch: GpuBatch::default() }
    }

    /// Adds a writer's schema, so that records written with it can be read.
    pub fn learn(&mut self, schema: &str) -> Result<(), String> {
        let parsed = Schema::parse_str(schema).map_err(|error| error.to_string())?;
        self.writers.insert(fingerprint(schema)?, schema::compile(&parsed)?);
        Ok(())
    }

    /// Reads a record of the telemetry topic.
    pub fn telemetry(&mut self, payload: &[u8]) -> Result<Decoded<'_>, DecodeError> {
        let (writer, mut cursor) = self.open(payload)?;
        let decoded = match writer.name.as_str() {
            "GpuBatch" => {
                decode::batch(&mut cursor, &writer, self.wanted, &mut self.batch)?;
                Decoded::Batch(&self.batch)
            }
            "XidEvent" => Decoded::Event(decode::event(&mut cursor, &writer)?),
            "Tick" => Decoded::Tick(decode::tick(&mut cursor, &writer)?),
            "Topology" => Decoded::Topology(decode::topology(&mut cursor, &writer)?),
            other => return Err(DecodeError::WrongType(other.to_owned())),
        };
        end(&cursor)?;
        let plausible = match &decoded {
            Decoded::Batch(batch) => {
                batch
                    .ticks
                    .iter()
                    .all(|tick| *tick >= 0 && PLAUSIBLE.contains(&batch.origin.observed_at.saturating_add(*tick)))
                    && PLAUSIBLE.contains(&batch.origin.observed_at)
            }
            Decoded::Event(event) => PLAUSIBLE.contains(&event.origin.observed_at),
            Decoded::Tick(tick) => PLAUSIBLE.contains(&tick.tick_at),
            Decoded::Topology(topology) => PLAUSIBLE.contains(&topology.epoch_at),
        };
        if plausible { Ok(decoded) } else { Err(IMPLAUSIBLE) }
    }

    /// Reads a record of the incidents topic.
    pub fn incident(&self, payload: &[u8]) -> Result<Incident, DecodeError> {
        let (writer, mut cursor) = self.open(payload)?;
        if writer.name != "Incident" {
            return Err(DecodeError::WrongType(writer.name.clone()));
        }
        let incident = decode::incident(&mut cursor, &writer)?;
        end(&cursor)?;
        Ok(incident)
    }

    /// Reads a record of the partials topic.
    pub fn upstream(&self, payload: &[u8]) -> Result<Upstream, DecodeError> {
        let (writer, mut cursor) = self.open(payload)?;
        let record = match writer.name.as_str() {
            "Partial" => Upstream::Partial(decode::partial(&mut cursor, &writer)?),
            "Watermark" => Upstream::Watermark(decode::watermark(&mut cursor, &writer)?),
            "Exclusion" => Upstream::Exclusion(decode::exclusion(&mut cursor, &writer)?),
            "Epoch" => decode::epoch(&mut cursor, &writer)?,
            other => return Err(DecodeError::WrongType(other.to_owned())),
        };
        end(&cursor)?;
        let plausible = match &record {
            Upstream::Partial(partial) => PLAUSIBLE.contains(&partial.pane_at),
            Upstream::Watermark(watermark) => PLAUSIBLE.contains(&watermark.watermark_at),
            Upstream::Topology { topology, .. } => PLAUSIBLE.contains(&topology.epoch_at),
            // Of a task that never spoke there is none.
            Upstream::Exclusion(_) => true,
        };
        if !plausible {
            return Err(IMPLAUSIBLE);
        }
        Ok(record)
    }

    fn open<'p>(&self, payload: &'p [u8]) -> Result<(Arc<RecordNode>, Cursor<'p>), DecodeError> {
        if payload.is_empty() {
            return Err(DecodeError::Empty);
        }
        if payload.len() > MAX_RECORD_BYTES {
            return Err(DecodeError::TooLarge);
        }
        let Some((header, body)) = payload.split_first_chunk::<HEADER_BYTES>() else {
            let foreign = payload.iter().zip(MAGIC).any(|(have, want)| *have != want);
            return Err(if foreign { DecodeError::Foreign } else { DecodeError::Truncated });
        };
        if header[..2] != MAGIC {
            return Err(DecodeError::Foreign);
        }
        let mut print = [0u8; 8];
        print.copy_from_slice(&header[2..]);
        let print = u64::from_le_bytes(print);
        let writer = self.writers.get(&print).ok_or(DecodeError::UnknownSchema(print))?;
        Ok((writer.clone(), Cursor::new(body)))
    }
}

fn end(cursor: &Cursor<'_>) -> Result<(), DecodeError> {
    if cursor.remaining() == 0 { Ok(()) } else { Err(DecodeError::TrailingBytes) }
}

#[cfg(test)]
mod tests;
