//! What can go wrong with a query, in a sentence each.

use datafusion::error::DataFusionError;
use gpufleet_runtime::exit::{Failure, Fault};

#[derive(Debug, thiserror::Error)]
pub enum QueryError {
    /// The text is no query that could run here.
    #[error("{0}")]
    Refused(String),
    #[error("the query took longer than {0} s; ask for less, or raise --timeout")]
    TooSlow(u64),
    #[error("the query needs more than its memory; ask for less, for example a shorter time")]
    TooLarge,
    #[error("the query failed: {0}")]
    Failed(String),
}

impl From<DataFusionError> for QueryError {
    fn from(error: DataFusionError) -> QueryError {
        let text = error.strip_backtrace();
        let text = text.lines().next().unwrap_or_default().trim().to_owned();
        match error.find_root() {
            DataFusionError::ResourcesExhausted(_) => QueryError::TooLarge,
            DataFusionError::Plan(_)
            | DataFusionError::SQL(..)
            | DataFusionError::SchemaError(..)
            | DataFusionError::NotImplemented(_) => QueryError::Refused(plain(&text)),
            _ => QueryError::Failed(plain(&text)),
        }
    }
}

/// Without the library's own prefixes.
fn plain(text: &str) -> String {
    let mut text = text;
    for prefix in ["Error during planning: ", "Schema error: ", "SQL error: ", "This feature is not implemented: "] {
        text = text.strip_prefix(prefix).unwrap_or(text);
    }
    text.to_owned()
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
