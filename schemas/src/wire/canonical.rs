//! The fingerprint that single-object framing carries: CRC-64-AVRO over the schema's Parsing Canonical Form.
//!
//! Written out here because apache-avro 0.22 keeps a primitive with a logical type as an object (`{"type":"long"}`
//! where the specification says `"long"`), so its fingerprints are nobody else's. A test holds ours against fastavro.

use serde_json::Value;

const PRIMITIVES: [&str; 8] = ["null", "boolean", "int", "long", "float", "double", "bytes", "string"];

/// Fingerprint of a schema file's text.
pub(crate) fn fingerprint(schema: &str) -> Result<u64, String> {
    let schema: Value = serde_json::from_str(schema).map_err(|error| error.to_string())?;
    let mut form = String::new();
    write(&schema, "", &mut form)?;
    Ok(form.bytes().fold(EMPTY, |print, byte| print >> 8 ^ step((print ^ u64::from(byte)) & 0xff)))
}

/// Fingerprint of nothing, and the polynomial (Avro specification, "Schema Fingerprints").
const EMPTY: u64 = 0xc15d_213a_a4d7_a795;

/// One byte through the polynomial.
fn step(byte: u64) -> u64 {
    (0..8).fold(byte, |print, _| print >> 1 ^ (EMPTY & (print & 1).wrapping_neg()))
}

/// A name with its name space, unless it has one or is a primitive.
fn full_name(name: &str, space: &str) -> String {
    if name.contains('.') || space.is_empty() || PRIMITIVES.contains(&name) {
        name.to_owned()
    } else {
        format!("{space}.{name}")
    }
}

/// Appends the canonical form (Avro specification, "Transforming into Parsing Canonical Form").
fn write(schema: &Value, space: &str, out: &mut String) -> Result<(), String> {
    match schema {
        Value::String(name) => out.push_str(&quoted(&full_name(name, space))),
        Value::Array(branches) => list('[', branches, ']', out, |branch, out| write(branch, space, out))?,
        Value::Object(object) => {
            let kind = object.get("type").ok_or("a type has no `type`")?;
            let Some(kind) = kind.as_str() else { return write(kind, space, out) };
            match kind {
                "record" | "error" | "enum" | "fixed" => write_named(object, kind, space, out)?,
                "array" | "map" => {
                    let item = if kind == "array" { "items" } else { "values" };
                    *out += &format!("{{\"type\":\"{kind}\",\"{item}\":");
                    write(object.get(item).ok_or_else(|| format!("a {kind} has no `{item}`"))?, space, out)?;
                    out.push('}');
                }
                name => out.push_str(&quoted(&full_name(name, space))),
            }
        }
        _ => return Err("a type is neither a name, a list nor an object".to_owned()),
    }
    Ok(())
}

fn write_named(
    object: &serde_json::Map<String, Value>,
    kind: &str,
    space: &str,
    out: &mut String,
) -> Result<(), String> {
    let text = |key: &str| object.get(key).and_then(Value::as_str);
    let name =
        full_name(text("name").ok_or_else(|| format!("a {kind} has no name"))?, text("namespace").unwrap_or(space));
    let space = name.rsplit_once('.').map_or("", |(space, _)| space);
    *out += &format!("{{\"name\":{},\"type\":\"{kind}\"", quoted(&name));
    let items = |key: &str| object.get(key).and_then(Value::as_array).ok_or_else(|| format!("{name} has no `{key}`"));
    match kind {
        "enum" => {
            *out += ",\"symbols\":";
            list('[', items("symbols")?, ']', out, |symbol, out| {
                out.push_str(&symbol.to_string());
                Ok(())
            })?;
        }
        "fixed" => {
            *out += &format!(",\"size\":{}", object.get("size").and_then(Value::as_u64).ok_or("a fixed has no size")?)
        }
        _ => {
            *out += ",\"fields\":";
            list('[', items("fields")?, ']', out, |field, out| {
                let name = field.get("name").and_then(Value::as_str).ok_or("a field has no name")?;
                *out += &format!("{{\"name\":{},\"type\":", quoted(name));
                write(field.get("type").ok_or("a field has no type")?, space, out)?;
                out.push('}');
                Ok(())
            })?;
        }
    }
    out.push('}');
    Ok(())
}

fn list<T>(
    open: char,
    items: &[T],
    close: char,
    out: &mut String,
    mut each: impl FnMut(&T, &mut String) -> Result<(), String>,
) -> Result<(), String> {
    out.push(open);
    for (i, item) in items.iter().enumerate() {
        if i > 0 {
            out.push(',');
        }
        each(item, out)?;
    }
    out.push(close);
    Ok(())
}

fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values from the Avro specification's test data (`schema-tests.txt`) and from fastavro.
    #[test]
    fn fingerprints_are_those_that_others_compute() {
        assert_eq!(fingerprint("\"null\"").unwrap(), 7_195_948_357_588_979_594);
        assert_eq!(fingerprint("\"int\"").unwrap(), 8_247_732_601_305_521_295);
        assert_eq!(fingerprint("{\"type\":\"long\",\"logicalType\":\"timestamp-micros\"}"), fingerprint("\"long\""));
        assert_eq!(
            fingerprint("{\"name\":\"foo\",\"type\":\"record\",\"namespace\":\"a.b\",\"doc\":\"x\",\"fields\":[]}"),
            fingerprint("{\"fields\":[],\"type\":\"record\",\"name\":\"a.b.foo\"}")
        );
    }
}
