//! FULL_TRANSITIVE: every version of a record reads every other, in both directions.
//!
//! A released schema file is never edited; a change is a new file. This is the check that a new file must pass.

use apache_avro::Schema;
use apache_avro::schema_compatibility::{Compatibility, SchemaCompatibility};

/// Says which pair of versions cannot read each other, and why; `Ok` when all can.
pub fn full_transitive(versions: &[(&str, &str)]) -> Result<(), String> {
    let mut parsed = Vec::new();
    for (name, text) in versions {
        let schema = Schema::parse_str(text).map_err(|error| format!("{name} is no Avro schema: {error}"))?;
        parsed.push((name, schema));
    }
    for (writer_name, writer) in &parsed {
        for (reader_name, reader) in &parsed {
            match SchemaCompatibility::can_read(writer, reader) {
                Ok(Compatibility::Full) => {}
                Ok(Compatibility::Partial) => {
                    return Err(format!("{reader_name} can read only part of what {writer_name} may write"));
                }
                Err(error) => return Err(format!("{reader_name} cannot read {writer_name}: {error}")),
            }
        }
    }
    Ok(())
}
