//! Opening a lake: a folder of Delta tables, one per [`Table`].
//!
//! Every table is created empty first, because the creating commit has no conflict check. A folder that holds other
//! things is no lake and is not turned into one.

use std::path::{Path, PathBuf};

use deltalake::kernel::StructType;
use deltalake::kernel::engine::arrow_conversion::TryIntoKernel;
use deltalake::protocol::SaveMode;
use deltalake::{DeltaTable, DeltaTableBuilder, DeltaTableError};
use gpufleet_schemas::table::{PARTITION_COLUMN, Table};
use url::Url;

use crate::exit::Failure;

/// A lake on local disk.
#[derive(Clone, Debug)]
pub struct Lake {
    root: PathBuf,
}

fn failed(what: &str, path: &Path, error: &DeltaTableError) -> Failure {
    Failure::external(format!("cannot {what} the table {}: {error}", path.display()))
}

impl Lake {
    /// Opens a lake for writing: creates the folder and whatever table is missing.
    pub async fn create(root: &Path) -> Result<Lake, Failure> {
        std::fs::create_dir_all(root)
            .map_err(|error| Failure::external(format!("cannot create the lake {}: {error}", root.display())))?;
        let lake = Lake { root: absolute(root)? };
        if !lake.has_tables() {
            lake.refuse_foreign_content()?;
        }
        for table in Table::ALL {
            if lake.exists(table) {
                lake.require_columns(table).await?;
            } else {
                lake.create_table(table).await?;
            }
        }
        Ok(lake)
    }

    /// Opens a lake that is there, for reading.
    pub fn open(root: &Path) -> Result<Lake, Failure> {
        if !root.is_dir() {
            return Err(Failure::config(format!(
                "there is no lake at {}; `gpufleet demo` and `gpufleet import` make one, and --lake says where it is",
                root.display()
            )));
        }
        let lake = Lake { root: absolute(root)? };
        let missing: Vec<_> = Table::ALL.into_iter().filter(|table| !lake.exists(*table)).map(Table::name).collect();
        if missing.is_empty() {
            Ok(lake)
        } else {
            Err(Failure::config(format!(
                "{} is not a lake: it lacks the tables {}; --lake names the folder that holds them",
                root.display(),
                missing.join(", ")
            )))
        }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn path(&self, table: Table) -> PathBuf {
        self.root.join(table.name())
    }

    /// Loads a table at its newest version.
    pub async fn table(&self, table: Table) -> Result<DeltaTable, Failure> {
        let path = self.path(table);
        DeltaTableBuilder::from_url(url_of(&path)?)
            .map_err(|error| failed("open", &path, &error))?
            .load()
            .await
            .map_err(|error| failed("open", &path, &error))
    }

    /// Delta drops what a table has no column for: a table of an earlier version is refused instead.
    async fn require_columns(&self, table: Table) -> Result<(), Failure> {
        let delta = self.table(table).await?;
        let snapshot = delta.snapshot().map_err(|error| failed("read", &self.path(table), &error))?;
        let schema = snapshot.schema();
        let missing: Vec<&str> = table
            .columns()
            .iter()
            .map(|column| column.name)
            .filter(|name| schema.fields().all(|field| field.name() != name))
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        Err(Failure::config(format!(
            "the table {} of the lake {} was made by an earlier version and lacks {}; give a new --lake, the old one stays \
             readable",
            table.name(),
            self.root.display(),
            missing.join(", ")
        )))
    }

    fn exists(&self, table: Table) -> bool {
        self.path(table).join("_delta_log").is_dir()
    }

    fn has_tables(&self) -> bool {
        Table::ALL.into_iter().any(|table| self.exists(table))
    }

    fn refuse_foreign_content(&self) -> Result<(), Failure> {
        let unreadable = |error| Failure::external(format!("cannot read {}: {error}", self.root.display()));
        match std::fs::read_dir(&self.root).map_err(unreadable)?.next() {
            None => Ok(()),
            Some(entry) => Err(Failure::config(format!(
                "{} is not a lake and not empty (it holds {}); --lake wants a lake, an empty folder or a new one",
                self.root.display(),
                entry.map(|entry| entry.file_name().to_string_lossy().into_owned()).unwrap_or_default()
            ))),
        }
    }

    async fn create_table(&self, table: Table) -> Result<(), Failure> {
        let path = self.path(table);
        std::fs::create_dir_all(&path)
            .map_err(|error| Failure::external(format!("cannot create {}: {error}", path.display())))?;
        let schema: StructType = table
            .schema()
            .as_ref()
            .try_into_kernel()
            .map_err(|error| Failure::bug(format!("the table {} has no Delta schema: {error}", table.name())))?;
        let statistics = table.statistics_columns().join(",");
        let created = DeltaTable::try_from_url(url_of(&path)?)
            .await
            .map_err(|error| failed("create", &path, &error))?
            .create()
            .with_table_name(table.name())
            .with_comment(table.doc())
            .with_columns(schema.fields().cloned())
            .with_partition_columns([PARTITION_COLUMN])
            .with_save_mode(SaveMode::Ignore)
            .with_configuration([("delta.dataSkippingStatsColumns".to_owned(), Some(statistics))])
            .await;
        created.map(drop).map_err(|error| failed("create", &path, &error))
    }
}

fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    path.canonicalize().map_err(|error| Failure::external(format!("cannot open {}: {error}", path.display())))
}

fn url_of(path: &Path) -> Result<Url, Failure> {
    Url::from_directory_path(path).map_err(|()| Failure::bug(format!("{} is no absolute path", path.display())))
}

/// An active file of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActiveFile {
    /// Path below the table's folder.
    pub path: deltalake::Path,
    pub bytes: u64,
    /// Days since 1970: the value of the partition column.
    pub date: Option<i32>,
}

/// The files that make up a loaded table, oldest first.
pub fn active_files(table: &DeltaTable) -> Result<Vec<ActiveFile>, Failure> {
    let snapshot = table.snapshot().map_err(|error| Failure::bug(format!("the table is not loaded: {error}")))?;
    let mut files: Vec<_> = snapshot
        .log_data()
        .iter()
        .map(|file| {
            let date = file.partition_values_map().get(PARTITION_COLUMN).cloned().flatten();
            let active = ActiveFile {
                path: file.object_store_path(),
                bytes: u64::try_from(file.size()).unwrap_or(0),
                date: date.and_then(|date| days_of(&date)),
            };
            (file.modification_time(), active)
        })
        .collect();
    files.sort_by(|(a_at, a), (b_at, b)| (a_at, &a.path).cmp(&(b_at, &b.path)));
    Ok(files.into_iter().map(|(_, file)| file).collect())
}

/// Days since 1970 of a partition value such as `2026-03-02`.
fn days_of(date: &str) -> Option<i32> {
    use deltalake::arrow::array::types::Date32Type;
    use deltalake::arrow::compute::kernels::cast_utils::Parser;
    Date32Type::parse(date)
}
