//! One object of `journalctl -o json` (systemd: `JOURNAL_EXPORT_FORMATS`, "Journal JSON Format"). Fields that are not
//! needed, and fields of an unexpected type, are passed over; a line that is no such object is none of ours.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::Value;

use super::stamp::Stamp;
use super::transport::{Record, Transport};

#[derive(Deserialize)]
struct Entry {
    #[serde(rename = "MESSAGE")]
    message: Value,
    #[serde(rename = "_TRANSPORT")]
    transport: Option<Value>,
    #[serde(rename = "SYSLOG_IDENTIFIER")]
    program: Option<Value>,
    #[serde(rename = "__REALTIME_TIMESTAMP")]
    realtime: Option<Value>,
    #[serde(rename = "_SOURCE_MONOTONIC_TIMESTAMP")]
    monotonic: Option<Value>,
    #[serde(rename = "_HOSTNAME")]
    host: Option<Value>,
    #[serde(rename = "_BOOT_ID")]
    boot_id: Option<Value>,
}

pub(super) fn json(line: &str) -> Option<Record<'static>> {
    let entry: Entry = serde_json::from_str(line).ok()?;
    let transport = text(entry.transport).or_else(|| text(entry.program));
    let realtime = micros(entry.realtime).map(|at_micros| Stamp::Wall { at_micros });
    let monotonic = micros(entry.monotonic).map(|micros| Stamp::Monotonic { micros });
    Some(Record {
        text: Cow::Owned(text(Some(entry.message))?),
        transport: match transport.as_deref() {
            Some("kernel") => Transport::Kernel,
            Some(_) => Transport::User,
            None => Transport::Unknown,
        },
        stamp: realtime.or(monotonic),
        host: text(entry.host).map(Cow::Owned),
        sequence: None,
        boot_id: text(entry.boot_id),
    })
}

/// A string, or the array of byte values that stands for one that is not printable.
fn text(value: Option<Value>) -> Option<String> {
    match value? {
        Value::String(text) => Some(text),
        Value::Array(items) => {
            let byte = |item: &Value| item.as_u64().and_then(|byte| u8::try_from(byte).ok());
            let bytes = items.iter().map(byte).collect::<Option<Vec<u8>>>()?;
            Some(String::from_utf8_lossy(&bytes).into_owned())
        }
        _ => None,
    }
}

fn micros(value: Option<Value>) -> Option<i64> {
    match value? {
        Value::String(digits) => digits.parse().ok(),
        Value::Number(number) => number.as_i64(),
        _ => None,
    }
}
