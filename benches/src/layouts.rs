//! The same batches in other wire layouts, for ADR 0001 and 0003, and arrow-avro as a reader of each.
//!
//! A layout differs from ours in one thing only; names, labels and framing are those of the released schema. Nothing
//! outside the benches writes or reads the others.

use arrow::error::ArrowError;
use arrow_avro::reader::{Decoder, ReaderBuilder};
use arrow_avro::schema::{AvroSchema, Fingerprint, SchemaStore};
use gpufleet_schemas::metric::{Metric, Tier, Width};
use gpufleet_schemas::record::{GpuBatch, GpuBlock, Telemetry};
use gpufleet_schemas::wire::{Encoder, RELEASED};
use serde_json::{Value, json};

/// How many samples arrow-avro gathers to a record batch, whatever the layout.
const SAMPLES_PER_FLUSH: usize = 4000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Ours: an array of differences for each GPU and metric.
    Differences,
    /// Arrays of the values themselves.
    Longs,
    /// Arrays of `float`, or `double` for metrics of 64 bits.
    Floats,
    /// A record for each sample, with a nullable column for each metric.
    Rows,
}

/// A batch in a layout: whole messages, one after the other.
#[derive(Clone, Debug)]
pub struct Message {
    pub bytes: Vec<u8>,
    pub records: usize,
    pub samples: usize,
}

impl Layout {
    pub const ALL: [Layout; 4] = [Layout::Differences, Layout::Longs, Layout::Floats, Layout::Rows];

    pub const fn name(self) -> &'static str {
        match self {
            Layout::Differences => "differences",
            Layout::Longs => "longs",
            Layout::Floats => "floats",
            Layout::Rows => "rows",
        }
    }

    /// The Avro schema, made from the released one.
    pub fn schema(self) -> String {
        let text = RELEASED.iter().rev().find(|(name, _)| name.starts_with("gpu_batch")).map(|(_, text)| *text);
        let mut schema: Value = serde_json::from_str(text.unwrap_or_default()).expect("a released schema is JSON");
        match self {
            // No record here uses the metrics' third branch, and without it the bytes are the same. With it, arrow-avro
            // 59.3.2 reads one record batch and fails at the next (arrow-rs issue 10876: counts survive a flush).
            Layout::Differences | Layout::Longs => {
                for (field, _) in block_fields(&mut schema).iter_mut().filter_map(with_metric) {
                    field["type"].as_array_mut().expect("a union").truncate(2);
                }
            }
            Layout::Floats => {
                for (field, metric) in block_fields(&mut schema).iter_mut().filter_map(with_metric) {
                    field["type"].as_array_mut().expect("a union").truncate(2);
                    field["type"][1]["items"] = json!(if metric.width() == Width::Int { "float" } else { "double" });
                }
            }
            Layout::Rows => return row_schema(&mut schema).to_string(),
        }
        schema.to_string()
    }

    /// The batch in this layout. Series with missing ticks are not written; the simulator makes none.
    pub fn encode(self, batch: &GpuBatch, encoder: &Encoder) -> Message {
        let samples = batch.sample_count();
        let mut bytes = Vec::new();
        if self == Layout::Differences {
            encoder.telemetry(&Telemetry::Batch(batch.clone()), &mut bytes);
            return Message { bytes, records: 1, samples };
        }
        let head = head(batch, encoder);
        if self == Layout::Rows {
            for block in &batch.gpus {
                put_rows(&mut bytes, &head, batch, block);
            }
            return Message { bytes, records: samples, samples };
        }
        bytes.extend_from_slice(&head);
        put_array(&mut bytes, &batch.ticks, |out, tick| put_long(out, *tick));
        put_array(&mut bytes, &batch.gpus, |out, block| self.put_block(out, block, batch.ticks.len()));
        Message { bytes, records: 1, samples }
    }

    fn put_block(self, out: &mut Vec<u8>, block: &GpuBlock, tick_count: usize) {
        put_labels(out, block);
        let fast = block.ticks(Tier::Fast);
        let put_positions =
            |out: &mut Vec<u8>, positions: &[i32]| put_array(out, positions, |out, at| put_long(out, i64::from(*at)));
        put_optional(out, (fast.len() != tick_count).then_some(fast), put_positions);
        put_positions(out, block.ticks(Tier::Slow));
        put_positions(out, block.ticks(Tier::Health));
        for metric in Metric::ALL {
            let series = block.series(*metric);
            debug_assert!(series.present.is_empty(), "{metric:?} has missing ticks");
            put_optional(out, (!series.is_empty()).then_some(&series.values), |out, values| {
                put_array(out, values, |out, value| match (self, metric.width()) {
                    (Layout::Floats, Width::Int) => out.extend_from_slice(&(*value as f32).to_le_bytes()),
                    (Layout::Floats, Width::Long) => out.extend_from_slice(&(*value as f64).to_le_bytes()),
                    _ => put_long(out, *value),
                });
            });
        }
    }

    /// arrow-avro for this layout. The fingerprint is that of our schema for all of them: a decoder knows one schema.
    pub fn decoder(self, encoder: &Encoder) -> Result<Decoder, ArrowError> {
        let head = head(&GpuBatch::default(), encoder);
        let print = head[2..].first_chunk().map_or(0, |print| u64::from_le_bytes(*print));
        let mut store = SchemaStore::new();
        store.set(Fingerprint::Rabin(print), AvroSchema::new(self.schema()))?;
        // 8 GPUs and 5 ticks a batch.
        let rows = if self == Layout::Rows { SAMPLES_PER_FLUSH } else { SAMPLES_PER_FLUSH / 40 };
        ReaderBuilder::new().with_batch_size(rows).with_writer_schema_store(store).build_decoder()
    }
}

/// Decodes everything with arrow-avro; how many records came out.
pub fn drain(decoder: &mut Decoder, messages: &[Message]) -> Result<usize, ArrowError> {
    let mut records = 0;
    for message in messages {
        let mut rest = message.bytes.as_slice();
        while !rest.is_empty() {
            let taken = decoder.decode(rest)?;
            rest = &rest[taken..];
            if decoder.batch_is_full() {
                records += flush(decoder)?;
            } else if taken == 0 {
                return Err(ArrowError::ParseError("arrow-avro stopped in the middle of a record".to_owned()));
            }
        }
    }
    Ok(records + flush(decoder)?)
}

fn flush(decoder: &mut Decoder) -> Result<usize, ArrowError> {
    let batch = decoder.flush()?;
    Ok(std::hint::black_box(batch).map_or(0, |batch| batch.num_rows()))
}

fn block_fields(schema: &mut Value) -> &mut Vec<Value> {
    let fields = schema["fields"].as_array_mut().expect("a record has fields");
    let gpus = fields.iter_mut().find(|field| field["name"] == "gpus").expect("a batch has GPUs");
    gpus["type"]["items"]["fields"].as_array_mut().expect("a block has fields")
}

fn with_metric(field: &mut Value) -> Option<(&mut Value, Metric)> {
    let metric = Metric::by_name(field["name"].as_str()?)?;
    Some((field, metric))
}

/// Origin and labels of the host, the instant, labels of the GPU, tiers, and a nullable column for each metric.
fn row_schema(schema: &mut Value) -> Value {
    let block = std::mem::take(block_fields(schema));
    let (mut metrics, mut labels): (Vec<Value>, Vec<Value>) =
        block.into_iter().partition(|field| field["name"].as_str().is_some_and(|name| Metric::by_name(name).is_some()));
    labels.retain(|field| field["name"].as_str().is_some_and(|name| !name.ends_with("_ticks")));
    for (field, metric) in metrics.iter_mut().filter_map(with_metric) {
        field["type"] = json!(["null", if metric.width() == Width::Int { "int" } else { "long" }]);
    }
    let mut fields = schema["fields"].as_array().map(|fields| fields[..2].to_vec()).unwrap_or_default();
    fields.push(json!({ "name": "at", "type": { "type": "long", "logicalType": "timestamp-micros" } }));
    fields.append(&mut labels);
    fields.push(json!({ "name": "tiers", "type": "int" }));
    fields.append(&mut metrics);
    json!({ "type": "record", "name": "GpuSample", "namespace": "io.gpufleet", "fields": fields })
}

fn put_rows(out: &mut Vec<u8>, head: &[u8], batch: &GpuBatch, block: &GpuBlock) {
    let mut positions = [0; Tier::ALL.len()];
    for (tick, tiers) in batch.tiers(block).into_iter().enumerate().filter(|(_, tiers)| *tiers != 0) {
        out.extend_from_slice(head);
        put_long(out, batch.tick_at(tick));
        put_labels(out, block);
        put_long(out, i64::from(tiers));
        for metric in Metric::ALL {
            let read = tiers & metric.tier().bit() != 0;
            let value = block.series(*metric).get(positions[metric.tier() as usize]).filter(|_| read);
            put_optional(out, value, put_long);
        }
        for tier in Tier::ALL.into_iter().filter(|tier| tiers & tier.bit() != 0) {
            positions[tier as usize] += 1;
        }
    }
}

/// Frame, origin and labels as our encoder writes them: a batch without ticks and GPUs, less its two empty arrays.
fn head(batch: &GpuBatch, encoder: &Encoder) -> Vec<u8> {
    let shell = GpuBatch { origin: batch.origin.clone(), labels: batch.labels.clone(), ..GpuBatch::default() };
    let mut head = Vec::new();
    encoder.telemetry(&Telemetry::Batch(shell), &mut head);
    head.truncate(head.len() - 2);
    head
}

fn put_labels(out: &mut Vec<u8>, block: &GpuBlock) {
    put_text(out, &block.gpu_uuid);
    put_optional(out, block.gpu_index, |out, index| put_long(out, i64::from(index)));
    for text in [&block.pci, &block.model, &block.job_id] {
        put_optional(out, text.as_deref(), put_text);
    }
    put_optional(out, block.step, put_long);
    put_long(out, block.power_kind as i64);
}

fn put_long(out: &mut Vec<u8>, value: i64) {
    let mut rest = ((value << 1) ^ (value >> 63)) as u64;
    while rest >= 0x80 {
        out.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    out.push(rest as u8);
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    put_long(out, text.len() as i64);
    out.extend_from_slice(text.as_bytes());
}

fn put_optional<T>(out: &mut Vec<u8>, value: Option<T>, put: impl FnOnce(&mut Vec<u8>, T)) {
    out.push(if value.is_some() { 2 } else { 0 });
    if let Some(value) = value {
        put(out, value);
    }
}

fn put_array<T>(out: &mut Vec<u8>, items: &[T], mut put: impl FnMut(&mut Vec<u8>, &T)) {
    if !items.is_empty() {
        put_long(out, items.len() as i64);
        items.iter().for_each(|item| put(out, item));
    }
    out.push(0);
}
