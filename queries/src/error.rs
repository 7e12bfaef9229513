//! What can go wrong with a query, in a sentence each.

use datafusion::error::DataFusionError;
use gpufleet_runtime::exit::{Failure, Fault};
use gpufleet_schemas::table::Table;

#[derive(Debug, thiserror::Error)]
pub enum QueryError {
    /// The text is no query that could run here.
    #[error("{0}")]
    Refused(String),
    #[error("the query took longer than {0} ms; ask for less, or raise --timeout")]
    TooSlow(u128),
    #[error("the query needs more than its memory; ask for less, for example a shorter time")]
    TooLarge,
    #[error("the query failed: {0}")]
    Failed(String),
}

impl From<DataFusionError> for QueryError {
    fn from(error: DataFusionError) -> QueryError {
        let root = error.find_root();
        let text = root.strip_backtrace();
        let text = text.lines().next().unwrap_or_default().trim();
        match root {
            DataFusionError::ResourcesExhausted(_) => QueryError::TooLarge,
            DataFusionError::SQL(problem, _) => {
                QueryError::Refused(format!("the query is no SQL: {}", lower(inner(&format!("{problem:?}")))))
            }
            DataFusionError::ArrowError(..) => QueryError::Refused(format!("a value does not fit: {}", plain(text))),
            DataFusionError::Plan(_)
            | DataFusionError::SchemaError(..)
            | DataFusionError::NotImplemented(_)
            | DataFusionError::Execution(_) => QueryError::Refused(plain(text)),
            _ => QueryError::Failed(plain(text)),
        }
    }
}

/// What stands between the first and the last quotation mark of a debug form.
fn inner(debug: &str) -> &str {
    debug.split_once('"').and_then(|(_, rest)| rest.rsplit_once('"')).map_or(debug, |(text, _)| text)
}

const PREFIXES: [&str; 7] = [
    "Error during planning: ",
    "Schema error: ",
    "SQL error: ",
    "Execution error: ",
    "Arrow error: ",
    "This feature is not implemented: ",
    "Invalid argument error: ",
];

/// In our words: without the library's own prefixes, and as a fragment of a sentence.
fn plain(text: &str) -> String {
    let text = PREFIXES.iter().fold(text, |text, prefix| text.strip_prefix(prefix).unwrap_or(text));
    if ["DML", "DDL", "Statement"].iter().any(|kind| text.starts_with(&format!("{kind} not supported"))) {
        return format!("queries are read-only here ({text})");
    }
    if let Some(table) =
        text.strip_prefix("table 'datafusion.public.").and_then(|rest| rest.strip_suffix("' not found"))
    {
        let known: Vec<_> = Table::ALL.iter().map(|table| table.name()).collect();
        return format!("there is no table {table}; there are {} and current_incidents", known.join(", "));
    }
    if let Some(name) = text.strip_prefix("Placeholder '$").and_then(|rest| rest.split('\'').next()) {
        return format!("the parameter ${name} has no value; give it with --set {name}=VALUE");
    }
    lower(text.trim_end_matches('.'))
}

fn lower(text: &str) -> String {
    let mut chars = text.chars();
    match chars.next() {
        Some(first) if !text.starts_with("SQL") => first.to_lowercase().chain(chars).collect(),
        _ => text.to_owned(),
    }
}

impl From<QueryError> for Failure {
    fn from(error: QueryError) -> Failure {
        let fault = match error {
            QueryError::Refused(_) => Fault::Usage,
            QueryError::TooSlow(_) | QueryError::TooLarge | QueryError::Failed(_) => Fault::External,
        };
        Failure::new(fault, error.to_string())
    }
}
