//! The thread that speaks to a store, and waits for what it does.

use std::future::Future;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

use super::error::StoreError;

/// How long a request may take, with all its retries.
pub(super) const DEADLINE: Duration = Duration::from_mins(3);
/// How long a waiter waits longer than that for a thread that may be busy.
const GRACE: Duration = Duration::from_secs(10);

/// A thread that runs futures. It ends when this is dropped; nobody waits for that, since a fork of the process has no such
/// thread.
#[derive(Debug)]
pub(super) struct Runtime {
    handle: Handle,
    _ends: oneshot::Sender<()>,
}

impl Runtime {
    pub(super) fn new() -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (ends, ended) = oneshot::channel();
        let thread = thread::Builder::new().name("checkpoint-store".to_owned());
        thread.spawn(move || {
            // An error says that the other side is gone, which is what ends this.
            runtime.block_on(ended).ok();
        })?;
        Ok(Self {
            handle,
            _ends: ends,
        })
    }

    /// Begins something that has a deadline.
    pub(super) fn start<T: Send + 'static>(
        &self,
        what: impl Future<Output = object_store::Result<T>> + Send + 'static,
    ) -> Waiting<T> {
        let (sender, receiver) = sync_channel(1);
        self.handle.spawn(async move {
            let ended = tokio::time::timeout(DEADLINE, what).await;
            sender.send(ended.ok()).ok(); // nobody waits for it any more
        });
        Waiting(receiver)
    }
}

/// Something that goes on.
#[derive(Debug)]
pub(super) struct Waiting<T>(Receiver<Option<object_store::Result<T>>>);

impl<T> Waiting<T> {
    /// Waits for its end.
    pub(super) fn wait(self) -> Result<T, StoreError> {
        match self.0.recv_timeout(DEADLINE + GRACE) {
            Ok(Some(ended)) => ended.map_err(StoreError::Answer),
            Ok(None) => Err(StoreError::Deadline(DEADLINE)),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                Err(StoreError::NoThread)
            }
        }
    }
}
