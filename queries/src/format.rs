//! Answers as text: a table for people, JSON lines or CSV for programs.

use arrow::array::RecordBatch;
use arrow::error::ArrowError;
use arrow::util::pretty::pretty_format_batches;

/// How an answer is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    #[default]
    Table,
    /// One object a line.
    Json,
    Csv,
}

/// The rows in a format.
pub fn render(batches: &[RecordBatch], format: Format) -> Result<String, ArrowError> {
    match format {
        Format::Table => pretty_format_batches(batches).map(|table| format!("{table}\n")),
        Format::Json => {
            let mut writer = arrow::json::WriterBuilder::new()
                .with_explicit_nulls(true)
                .build::<_, arrow::json::writer::LineDelimited>(Vec::new());
            for batch in batches {
                writer.write(batch)?;
            }
            writer.finish()?;
            Ok(String::from_utf8_lossy(&writer.into_inner()).into_owned())
        }
        Format::Csv => {
            let mut out = Vec::new();
            let mut writer = arrow::csv::Writer::new(&mut out);
            for batch in batches {
                writer.write(batch)?;
            }
            drop(writer);
            Ok(String::from_utf8_lossy(&out).into_owned())
        }
    }
}
