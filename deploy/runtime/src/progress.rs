//! What a running role tells whoever started it, and how it is asked to stop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use crate::exit::Failure;

#[derive(Debug, Default)]
struct Inner {
    stop: AtomicBool,
    next: Vec<AtomicI64>,
    bytes: Vec<AtomicU64>,
}

/// How far a role has read one topic: per partition the next offset and the bytes so far. Cheap to clone and to share.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<Inner>);

impl Progress {
    pub fn new(partitions: i32) -> Progress {
        let count = usize::try_from(partitions).unwrap_or(0);
        Progress(Arc::new(Inner {
            stop: AtomicBool::new(false),
            next: std::iter::repeat_with(AtomicI64::default).take(count).collect(),
            bytes: std::iter::repeat_with(AtomicU64::default).take(count).collect(),
        }))
    }

    /// A record was read to its end.
    pub fn consumed(&self, partition: i32, offset: i64, bytes: usize) {
        if let Some((next, total)) =
            usize::try_from(partition).ok().and_then(|p| Some((self.0.next.get(p)?, self.0.bytes.get(p)?)))
        {
            next.store(offset + 1, Ordering::SeqCst);
            total.fetch_add(bytes as u64, Ordering::SeqCst);
        }
    }

    /// The next offset of every partition.
    pub fn next(&self) -> Vec<i64> {
        self.0.next.iter().map(|next| next.load(Ordering::SeqCst)).collect()
    }

    /// Bytes read of a partition.
    pub fn bytes(&self, partition: i32) -> u64 {
        usize::try_from(partition)
            .ok()
            .and_then(|p| self.0.bytes.get(p))
            .map_or(0, |bytes| bytes.load(Ordering::SeqCst))
    }

    /// Asks the role to finish what it holds and to return.
    pub fn stop(&self) {
        self.0.stop.store(true, Ordering::SeqCst);
    }

    /// Stops when the process is asked to end (SIGINT, SIGTERM).
    pub fn stop_on_signal(&self) -> Result<(), Failure> {
        use tokio::signal::unix::{SignalKind, signal};
        let failed = |error: std::io::Error| Failure::external(format!("cannot listen for signals: {error}"));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (mut interrupt, mut terminate) = {
            let _guard = runtime.enter();
            (signal(SignalKind::interrupt()).map_err(failed)?, signal(SignalKind::terminate()).map_err(failed)?)
        };
        let progress = self.clone();
        std::thread::spawn(move || {
            runtime.block_on(async {
                tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
            });
            progress.stop();
        });
        Ok(())
    }

    pub fn stopping(&self) -> bool {
        self.0.stop.load(Ordering::SeqCst)
    }
}
