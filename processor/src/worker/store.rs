//! Where snapshots lie: an object store, below `<task>/<version>/<next offset>`.
//!
//! A name is written once. Whoever comes second finds the same bytes, or has found an error in the determinism of the
//! rules. Three snapshots of each version are kept, and three versions, so that a roll-back finds its own.

use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::Duration;

use futures::TryStreamExt;
use gpufleet_runtime::exit::Failure;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt, PutMode, PutOptions};

use crate::engine::book::TaskId;

/// Longest that an object store may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// Snapshots kept of each version.
const KEPT: usize = 3;
/// Versions kept.
const VERSIONS_KEPT: usize = 3;

/// What a snapshot is called within its task.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name {
    pub next_offset: i64,
    pub version: String,
}

/// What became of a snapshot that was put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    Stored,
    /// Another owner of the task has stored the same bytes.
    Same,
    /// Another owner has stored other bytes under this name: the rules are not deterministic.
    Differs,
}

/// The snapshots of all tasks.
#[derive(Clone, Debug)]
pub struct Store {
    objects: Arc<dyn ObjectStore>,
    runtime: Arc<tokio::runtime::Runtime>,
    name: String,
}

impl Store {
    /// Snapshots in a folder, which is made where it is missing.
    pub fn folder(path: &FilePath) -> Result<Store, Failure> {
        let failed = |error: &dyn std::fmt::Display| {
            Failure::external(format!("cannot keep snapshots in {}: {error}", path.display()))
        };
        std::fs::create_dir_all(path).map_err(|error| failed(&error))?;
        let objects = LocalFileSystem::new_with_prefix(path).map_err(|error| failed(&error))?;
        Store::of(Arc::new(objects), &path.display().to_string())
    }

    /// Snapshots that end with the process, for a log that does so too.
    pub fn memory() -> Result<Store, Failure> {
        Store::of(Arc::new(InMemory::new()), "memory")
    }

    pub fn of(objects: Arc<dyn ObjectStore>, name: &str) -> Result<Store, Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| Failure::external(format!("cannot start: {error}")))?;
        Ok(Store { objects, runtime: Arc::new(runtime), name: name.to_owned() })
    }

    /// An object store that hangs fails.
    fn wait<T>(&self, work: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        self.runtime.block_on(async {
            tokio::time::timeout(PATIENCE, work)
                .await
                .unwrap_or_else(|late| Err(Error::Generic { store: "snapshots", source: Box::new(late) }))
        })
    }

    fn failed(&self, what: &str, error: &dyn std::fmt::Display) -> Failure {
        Failure::external(format!("cannot {what} snapshots in {}: {error}", self.name))
    }

    /// The task's snapshots, newest last.
    pub fn list(&self, task: &TaskId) -> Result<Vec<Name>, Failure> {
        let prefix = folder_of(task);
        let found: Vec<_> =
            self.wait(self.objects.list(Some(&prefix)).try_collect()).map_err(|error| self.failed("list", &error))?;
        let mut names: Vec<Name> = found
            .iter()
            .filter_map(|found| {
                let mut parts = found.location.prefix_match(&prefix)?;
                let (version, offset) = (parts.next()?, parts.next()?);
                let next_offset = offset.as_ref().parse().ok()?;
                parts.next().is_none().then(|| Name { next_offset, version: version.as_ref().to_owned() })
            })
            .collect();
        names.sort();
        Ok(names)
    }

    /// The bytes of a snapshot; none when it is gone.
    pub fn get(&self, task: &TaskId, name: &Name) -> Result<Option<Vec<u8>>, Failure> {
        let read = async { self.objects.get(&path_of(task, name)).await?.bytes().await };
        match self.wait(read) {
            Ok(bytes) => Ok(Some(bytes.to_vec())),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.failed("read", &error)),
        }
    }

    /// Stores a snapshot unless its name is taken.
    pub fn put(&self, task: &TaskId, name: &Name, bytes: &[u8]) -> Result<Put, Failure> {
        let create = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        let path = path_of(task, name);
        match self.wait(self.objects.put_opts(&path, bytes.to_vec().into(), create)) {
            Ok(_) => Ok(Put::Stored),
            Err(Error::AlreadyExists { .. }) => {
                let there = self.get(task, name)?;
                match there {
                    Some(there) if there == bytes => Ok(Put::Same),
                    // A damaged one is no contradiction: it is replaced.
                    Some(there) if super::snapshot::Snapshot::decode(&there).is_err() => {
                        let replaced = self.wait(self.objects.put(&path, bytes.to_vec().into()));
                        replaced.map(|_| Put::Stored).map_err(|error| self.failed("replace", &error))
                    }
                    Some(_) => Ok(Put::Differs),
                    None => Ok(Put::Stored),
                }
            }
            Err(error) => Err(self.failed("store", &error)),
        }
    }

    /// Deletes what is older than what is kept.
    pub fn prune(&self, task: &TaskId) -> Result<(), Failure> {
        let names = self.list(task)?;
        let mut versions: Vec<&str> = Vec::new();
        for name in names.iter().rev() {
            if !versions.contains(&name.version.as_str()) {
                versions.push(&name.version);
            }
        }
        for (age, version) in versions.iter().enumerate() {
            let of_version: Vec<&Name> = names.iter().rev().filter(|name| name.version == *version).collect();
            let kept = if age < VERSIONS_KEPT { KEPT } else { 0 };
            for name in of_version.into_iter().skip(kept) {
                match self.wait(self.objects.delete(&path_of(task, name))) {
                    Ok(()) | Err(Error::NotFound { .. }) => {}
                    Err(error) => return Err(self.failed("delete", &error)),
                }
            }
        }
        Ok(())
    }
}

fn folder_of(task: &TaskId) -> Path {
    let parts = task.log_id.split('/').chain([task.topic.as_str()]).map(str::to_owned);
    Path::from_iter(parts.chain([task.partition.to_string()]))
}

fn path_of(task: &TaskId, name: &Name) -> Path {
    folder_of(task).join(name.version.as_str()).join(format!("{:020}", name.next_offset))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::snapshot::Snapshot;

    fn task() -> TaskId {
        TaskId { log_id: "cluster/gpu.telemetry".into(), topic: "gpu.telemetry".into(), partition: 3 }
    }

    fn name(version: &str, next_offset: i64) -> Name {
        Name { next_offset, version: version.to_owned() }
    }

    fn bytes(version: &str, next_offset: i64, seed: u64) -> Vec<u8> {
        let (task, version) = (task().to_string(), version.to_owned());
        Snapshot { task, version, next_offset, last_record: Some(seed), sections: Vec::new() }.encode()
    }

    #[test]
    fn a_name_is_written_once_and_other_bytes_under_it_are_told() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::folder(folder.path()).expect("a store");
        let first = bytes("a", 7, 1);
        assert_eq!(store.put(&task(), &name("a", 7), &first).expect("puts"), Put::Stored);
        assert_eq!(store.put(&task(), &name("a", 7), &first).expect("puts"), Put::Same);
        assert_eq!(store.put(&task(), &name("a", 7), &bytes("a", 7, 2)).expect("puts"), Put::Differs);
        assert_eq!(store.get(&task(), &name("a", 7)).expect("reads"), Some(first));
        assert_eq!(store.get(&task(), &name("a", 8)).expect("reads"), None);
    }

    #[test]
    fn a_damaged_snapshot_is_replaced() {
        let store = Store::memory().expect("a store");
        store.put(&task(), &name("a", 7), b"damaged").expect("puts");
        assert_eq!(store.put(&task(), &name("a", 7), &bytes("a", 7, 1)).expect("puts"), Put::Stored);
        assert_eq!(store.get(&task(), &name("a", 7)).expect("reads"), Some(bytes("a", 7, 1)));
    }

    #[test]
    fn three_of_each_of_three_versions_are_kept() {
        let store = Store::memory().expect("a store");
        for (i, version) in ["a", "b", "c", "d"].into_iter().enumerate() {
            for offset in 0..5 {
                store.put(&task(), &name(version, 10 * i as i64 + offset), b"x").expect("puts");
            }
        }
        store.prune(&task()).expect("prunes");
        let left = store.list(&task()).expect("lists");
        assert_eq!(left.len(), 9);
        assert!(left.iter().all(|name| name.version != "a" && name.next_offset % 10 >= 2), "{left:?}");
        let other = TaskId { partition: 30, ..task() };
        assert!(store.list(&other).expect("lists").is_empty(), "partition 3 is no prefix of partition 30");
    }
}
