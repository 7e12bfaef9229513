//! Columns of a table by name and type, and the ones that several tables share.
//!
//! Takes a record batch and gives typed arrays; a file that another version wrote is refused by name, never a panic.

use arrow::array::{
    Array, ArrowPrimitiveType, BooleanArray, Int32Array, Int64Array, PrimitiveArray, RecordBatch, StringArray,
    TimestampMicrosecondArray,
};
use gpufleet_runtime::exit::Failure;
use gpufleet_schemas::record::{Labels, Origin};
use gpufleet_schemas::table::Table;

/// The columns of some rows of a table.
pub(super) struct Columns<'a> {
    table: Table,
    rows: &'a RecordBatch,
}

impl<'a> Columns<'a> {
    pub(super) fn of(table: Table, rows: &'a RecordBatch) -> Columns<'a> {
        Columns { table, rows }
    }

    pub(super) fn len(&self) -> usize {
        self.rows.num_rows()
    }

    fn column<T: Array + 'static>(&self, name: &str) -> Result<&'a T, Failure> {
        let column = self.rows.column_by_name(name).and_then(|column| column.as_any().downcast_ref::<T>());
        column.ok_or_else(|| {
            Failure::external(format!(
                "a file of the table {} has no column {name} of the type that this version writes; read the lake with \
                 the version that wrote it",
                self.table.name()
            ))
        })
    }

    pub(super) fn text(&self, name: &str) -> Result<&'a StringArray, Failure> {
        self.column(name)
    }

    pub(super) fn int(&self, name: &str) -> Result<&'a Int32Array, Failure> {
        self.column(name)
    }

    pub(super) fn long(&self, name: &str) -> Result<&'a Int64Array, Failure> {
        self.column(name)
    }

    pub(super) fn instant(&self, name: &str) -> Result<&'a TimestampMicrosecondArray, Failure> {
        self.column(name)
    }

    pub(super) fn boolean(&self, name: &str) -> Result<&'a BooleanArray, Failure> {
        self.column(name)
    }
}

/// A text that may be null.
pub(super) fn text(column: &StringArray, i: usize) -> Option<&str> {
    column.is_valid(i).then(|| column.value(i))
}

/// The same, to keep.
pub(super) fn owned(column: &StringArray, i: usize) -> Option<String> {
    text(column, i).map(str::to_owned)
}

/// A number or instant that may be null.
pub(super) fn number<T: ArrowPrimitiveType>(column: &PrimitiveArray<T>, i: usize) -> Option<T::Native> {
    column.is_valid(i).then(|| column.value(i))
}

/// Which record a row is of, and its event time.
pub(super) struct SourceColumns<'a> {
    pub(super) offset: &'a Int64Array,
    pub(super) appended_at: &'a TimestampMicrosecondArray,
    pub(super) observed_at: &'a TimestampMicrosecondArray,
}

impl<'a> SourceColumns<'a> {
    pub(super) const NAMES: [&'static str; 3] = ["offset", "ingested_at", "observed_at"];

    pub(super) fn of(rows: &Columns<'a>) -> Result<SourceColumns<'a>, Failure> {
        Ok(SourceColumns {
            offset: rows.long("offset")?,
            appended_at: rows.instant("ingested_at")?,
            observed_at: rows.instant("observed_at")?,
        })
    }
}

/// Who published a record.
pub(super) struct HostColumns<'a> {
    host: &'a StringArray,
    boot_id: &'a StringArray,
    seq: &'a Int64Array,
    reset_epoch: &'a Int32Array,
    collector_version: &'a StringArray,
    site: &'a StringArray,
    row: &'a StringArray,
    rack: &'a StringArray,
    feeds: &'a StringArray,
    driver_version: &'a StringArray,
}

impl<'a> HostColumns<'a> {
    pub(super) const NAMES: [&'static str; 10] = [
        "host",
        "boot_id",
        "seq",
        "reset_epoch",
        "collector_version",
        "site",
        "row",
        "rack",
        "feeds",
        "driver_version",
    ];

    pub(super) fn of(rows: &Columns<'a>) -> Result<HostColumns<'a>, Failure> {
        Ok(HostColumns {
            host: rows.text("host")?,
            boot_id: rows.text("boot_id")?,
            seq: rows.long("seq")?,
            reset_epoch: rows.int("reset_epoch")?,
            collector_version: rows.text("collector_version")?,
            site: rows.text("site")?,
            row: rows.text("row")?,
            rack: rows.text("rack")?,
            feeds: rows.text("feeds")?,
            driver_version: rows.text("driver_version")?,
        })
    }

    /// What the host had lost is not restored: it is in `losses`.
    pub(super) fn origin(&self, i: usize, observed_at: i64) -> Origin {
        Origin {
            host: self.host.value(i).to_owned(),
            boot_id: self.boot_id.value(i).to_owned(),
            seq: self.seq.value(i),
            reset_epoch: self.reset_epoch.value(i),
            collector_version: self.collector_version.value(i).to_owned(),
            observed_at,
            lost: Vec::new(),
        }
    }

    pub(super) fn labels(&self, i: usize) -> Labels {
        let feeds = text(self.feeds, i);
        Labels {
            site: owned(self.site, i),
            row: owned(self.row, i),
            rack: owned(self.rack, i),
            feeds: feeds.map(|feeds| feeds.split(',').map(str::to_owned).collect()).unwrap_or_default(),
            driver_version: owned(self.driver_version, i),
        }
    }
}
