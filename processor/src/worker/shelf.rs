//! The worker's way to its store: snapshots are stored beside the work, one after the other.

use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use gpufleet_runtime::exit::Failure;

use super::store::{Name, Put, Store};
use crate::engine::book::TaskId;

/// A snapshot to store.
pub(super) struct Job {
    pub(super) partition: i32,
    pub(super) task: TaskId,
    pub(super) name: Name,
    pub(super) bytes: Vec<u8>,
}

/// What became of one.
pub(super) struct Stored {
    pub(super) partition: i32,
    pub(super) next_offset: i64,
    pub(super) put: Result<Put, Failure>,
}

/// Stores snapshots: beside the worker, so that a slow store delays no record, or at once in a simulation.
pub struct Shelf {
    pub(super) store: Store,
    beside: Option<(SyncSender<Job>, Receiver<Stored>)>,
    at_once: Vec<Stored>,
}

impl Shelf {
    /// Stores at once.
    pub fn at_once(store: Store) -> Shelf {
        Shelf { store, beside: None, at_once: Vec::new() }
    }

    /// Stores on a thread of its own, which ends with the shelf.
    pub fn beside(store: Store) -> Result<Shelf, Failure> {
        let (jobs, todo) = sync_channel::<Job>(4);
        let (done, results) = sync_channel::<Stored>(64);
        let theirs = store.clone();
        std::thread::Builder::new()
            .name("snapshots".to_owned())
            .spawn(move || {
                for job in todo {
                    if done.send(carry_out(&theirs, &job)).is_err() {
                        break;
                    }
                }
            })
            .map_err(|error| Failure::external(format!("cannot start the thread that stores snapshots: {error}")))?;
        Ok(Shelf { store, beside: Some((jobs, results)), at_once: Vec::new() })
    }

    /// Takes a job, or gives it back when the store is behind.
    pub(super) fn put(&mut self, job: Job) -> Result<Option<Job>, Failure> {
        let Some((jobs, _)) = &self.beside else {
            self.at_once.push(carry_out(&self.store, &job));
            return Ok(None);
        };
        match jobs.try_send(job) {
            Ok(()) => Ok(None),
            Err(TrySendError::Full(job)) => Ok(Some(job)),
            Err(TrySendError::Disconnected(_)) => Err(Failure::bug("the thread that stores snapshots has ended")),
        }
    }

    pub(super) fn stored(&mut self) -> Option<Stored> {
        match &self.beside {
            Some((_, results)) => results.try_recv().ok(),
            None => self.at_once.pop(),
        }
    }
}

fn carry_out(store: &Store, job: &Job) -> Stored {
    let put = store.put(&job.task, &job.name, &job.bytes);
    if put.is_ok()
        && let Err(error) = store.prune(&job.task)
    {
        tracing::warn!(%error, "old snapshots stay");
    }
    Stored { partition: job.partition, next_offset: job.name.next_offset, put }
}
