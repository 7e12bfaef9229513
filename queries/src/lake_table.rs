//! A table of the lake as a plain scan of its active Parquet files.
//!
//! The Delta log says which files are active; from there on they are ordinary Parquet, so every optimisation that
//! DataFusion has for Parquet applies. The table is a fixed snapshot: a commit after opening is not seen.

use std::sync::Arc;

use arrow::datatypes::{Field, Schema, SchemaRef};
use datafusion::catalog::{Session, TableProvider};
use datafusion::common::{DFSchema, ScalarValue, exec_err};
use datafusion::datasource::TableType;
use datafusion::datasource::listing::PartitionedFile;
use datafusion::datasource::object_store::ObjectStoreUrl;
use datafusion::datasource::physical_plan::{FileGroup, FileScanConfigBuilder, ParquetSource};
use datafusion::datasource::source::DataSourceExec;
use datafusion::datasource::table_schema::TableSchema;
use datafusion::error::Result;
use datafusion::logical_expr::utils::conjunction;
use datafusion::logical_expr::{Expr, TableProviderFilterPushDown};
use datafusion::physical_plan::ExecutionPlan;
use gpufleet_runtime::exit::Failure;
use gpufleet_runtime::lake::{Lake, active_files};
use gpufleet_schemas::table::{PARTITION_COLUMN, Table};
use object_store::ObjectMeta;
use object_store::path::Path;

/// A snapshot of one table.
#[derive(Debug)]
pub struct LakeTable {
    schema: TableSchema,
    files: Vec<PartitionedFile>,
}

impl LakeTable {
    /// Lists the files of the table's newest version.
    pub async fn open(lake: &Lake, table: Table) -> std::result::Result<LakeTable, Failure> {
        let delta = lake.table(table).await?;
        let folder = lake.path(table);
        let unreadable = |error: &dyn std::fmt::Display| {
            Failure::external(format!("cannot read the table {}: {error}", folder.display()))
        };
        let mut files = Vec::new();
        for file in active_files(&delta)? {
            let path = folder.join(file.path.as_ref());
            let meta = ObjectMeta {
                location: Path::from_filesystem_path(&path).map_err(|error| unreadable(&error))?,
                last_modified: Default::default(),
                size: file.bytes,
                e_tag: None,
                version: None,
            };
            let date = ScalarValue::Date32(file.date);
            files.push(PartitionedFile::from(meta).with_partition_values(vec![date]));
        }
        let full = table.schema();
        let in_file: Vec<Field> = full
            .fields()
            .iter()
            .filter(|field| field.name() != PARTITION_COLUMN)
            .map(|field| field.as_ref().clone())
            .collect();
        let partition = full.field_with_name(PARTITION_COLUMN).map_err(|error| Failure::bug(error.to_string()))?;
        let schema = TableSchema::builder(Arc::new(Schema::new(in_file)))
            .with_table_partition_cols(vec![Arc::new(partition.clone())])
            .build();
        Ok(LakeTable { schema, files })
    }
}

#[async_trait::async_trait]
impl TableProvider for LakeTable {
    fn schema(&self) -> SchemaRef {
        self.schema.table_schema().clone()
    }

    fn table_type(&self) -> TableType {
        TableType::Base
    }

    fn supports_filters_pushdown(&self, filters: &[&Expr]) -> Result<Vec<TableProviderFilterPushDown>> {
        // Statistics skip files and row groups; what is left is filtered again.
        Ok(vec![TableProviderFilterPushDown::Inexact; filters.len()])
    }

    async fn scan(
        &self,
        state: &dyn Session,
        projection: Option<&Vec<usize>>,
        filters: &[Expr],
        limit: Option<usize>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let mut source = ParquetSource::new(self.schema.clone());
        if let Some(filter) = conjunction(filters.iter().cloned()) {
            let schema = DFSchema::try_from(self.schema())?;
            source = source.with_predicate(state.create_physical_expr(filter, &schema)?);
        }
        let groups = FileGroup::new(self.files.clone()).split_files(state.config().target_partitions().max(1));
        let config = FileScanConfigBuilder::new(ObjectStoreUrl::local_filesystem(), Arc::new(source))
            .with_file_groups(groups)
            .with_projection_indices(projection.cloned())?
            .with_limit(limit)
            .build();
        Ok(DataSourceExec::from_data_source(config))
    }

    async fn insert_into(
        &self,
        _: &dyn Session,
        _: Arc<dyn ExecutionPlan>,
        _: datafusion::logical_expr::dml::InsertOp,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        exec_err!("the lake is read-only here")
    }
}
