//! Questions that tests ask of a lake.

use std::path::Path;

use gpufleet_queries::{Format, Limits, Session, format};

/// The answer to `sql` as JSON objects.
pub fn ask(lake: &Path, sql: &str) -> Vec<serde_json::Value> {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let answer = runtime.block_on(async {
        let session = Session::open(lake, Limits::default()).await.expect("the lake opens");
        session.run(sql, &[]).await.unwrap_or_else(|error| panic!("{sql}: {error}"))
    });
    let text = format::render(&answer.batches, Format::Json).expect("renders");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// The one number that `sql` answers.
pub fn number(lake: &Path, sql: &str) -> i64 {
    let rows = ask(lake, sql);
    let value = rows.first().and_then(|row| row.as_object()?.values().next()?.as_i64());
    value.unwrap_or_else(|| panic!("{sql} gives no number: {rows:?}"))
}
