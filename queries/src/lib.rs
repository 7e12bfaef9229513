//! Queries: the lake's Parquet files to answers in SQL.
//!
//! Takes a folder of Delta tables, gives rows. It reads only (law L10): plans are verified, and it holds nothing that
//! could write. It knows neither Kafka nor how rows come about.

pub mod error;
pub mod format;
pub mod lake_table;
pub mod question;
pub mod session;

pub use error::QueryError;
pub use format::Format;
pub use question::Question;
pub use session::{Limits, Session};
