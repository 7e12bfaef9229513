//! One lake, opened for questions: its tables and views, read-only, with limits.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use arrow::array::RecordBatch;
use datafusion::common::ScalarValue;
use datafusion::execution::SessionStateBuilder;
use datafusion::execution::memory_pool::FairSpillPool;
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::prelude::{SQLOptions, SessionConfig, SessionContext};
use futures::StreamExt;
use gpufleet_runtime::exit::Failure;
use gpufleet_runtime::lake::Lake;
use gpufleet_schemas::table::Table;

use crate::QueryError;
use crate::lake_table::LakeTable;

/// The newest revision of every incident.
const CURRENT_INCIDENTS: &str = include_str!("../sql/views/current_incidents.sql");

/// What a query may use (law L10).
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub memory_bytes: usize,
    /// Rows beyond this are left out, and that is said.
    pub rows: usize,
    pub time: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { memory_bytes: 1 << 30, rows: 100_000, time: Duration::from_secs(120) }
    }
}

/// Rows of an answer.
#[derive(Clone, Debug)]
pub struct Answer {
    pub batches: Vec<RecordBatch>,
    /// The row limit cut the answer.
    pub cut: bool,
}

impl Answer {
    pub fn row_count(&self) -> usize {
        self.batches.iter().map(RecordBatch::num_rows).sum()
    }
}

/// An opened lake.
pub struct Session {
    context: SessionContext,
    limits: Limits,
}

impl Session {
    /// Opens the lake at its newest versions.
    pub async fn open(root: &Path, limits: Limits) -> Result<Session, Failure> {
        let lake = Lake::open(root)?;
        let config = SessionConfig::new()
            .with_information_schema(true)
            .with_target_partitions(std::thread::available_parallelism().map_or(2, |cores| cores.get().min(8)))
            .set_str("datafusion.execution.time_zone", "UTC");
        let runtime = RuntimeEnvBuilder::new()
            .with_memory_pool(Arc::new(FairSpillPool::new(limits.memory_bytes)))
            .build_arc()
            .map_err(|error| Failure::bug(format!("cannot start the query engine: {error}")))?;
        let state =
            SessionStateBuilder::new().with_config(config).with_runtime_env(runtime).with_default_features().build();
        let context = SessionContext::new_with_state(state);
        let failed =
            |error: datafusion::error::DataFusionError| Failure::bug(format!("cannot register a table: {error}"));
        for table in Table::ALL {
            let provider = Arc::new(LakeTable::open(&lake, table).await?);
            context.register_table(table.name(), provider).map_err(failed)?;
        }
        let view = context.sql(CURRENT_INCIDENTS).await.map_err(failed)?.into_view();
        context.register_table("current_incidents", view).map_err(failed)?;
        Ok(Session { context, limits })
    }

    /// Runs one read-only statement. `$name` in it takes the value of the parameter of that name.
    pub async fn run(&self, sql: &str, parameters: &[(String, String)]) -> Result<Answer, QueryError> {
        let answer = self.collect(sql, parameters);
        tokio::time::timeout(self.limits.time, answer)
            .await
            .map_err(|_| QueryError::TooSlow(self.limits.time.as_millis()))?
    }

    async fn collect(&self, sql: &str, parameters: &[(String, String)]) -> Result<Answer, QueryError> {
        let read_only = SQLOptions::new().with_allow_ddl(false).with_allow_dml(false).with_allow_statements(false);
        let frame = self.context.sql_with_options(sql, read_only).await?;
        let values: Vec<(String, ScalarValue)> =
            parameters.iter().map(|(name, value)| (name.clone(), ScalarValue::Utf8(Some(value.clone())))).collect();
        let frame = if values.is_empty() { frame } else { frame.with_param_values(values)? };
        let schema = Arc::new(frame.schema().as_arrow().clone());
        let mut stream = frame.execute_stream().await?;
        let (mut batches, mut rows) = (Vec::new(), 0);
        while let Some(batch) = stream.next().await {
            let batch = batch?;
            let room = self.limits.rows - rows;
            if batch.num_rows() > room {
                batches.push(batch.slice(0, room));
                return Ok(Answer { batches, cut: true });
            }
            rows += batch.num_rows();
            batches.push(batch);
        }
        if batches.is_empty() {
            batches.push(RecordBatch::new_empty(schema));
        }
        Ok(Answer { batches, cut: false })
    }
}
