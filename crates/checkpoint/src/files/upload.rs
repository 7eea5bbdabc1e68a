//! An object whose bytes come one after another, sent while they come.
//!
//! At most [`IN_FLIGHT`] parts are on their way and one is filled: 40 MiB of memory for objects of up to 80 GB, whose parts
//! have 8 MiB.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;

use object_store::path::Path as Key;
use object_store::{MultipartUpload, ObjectStoreExt, PutPayload};

use super::error::StoreError;
use super::layout::sent_bytes;
use super::runtime::Waiting;
use super::store::{Connection, Store, failed, key_of};
use crate::error::CheckpointError;

/// How many parts are on their way at most.
const IN_FLIGHT: usize = 4;

/// An object that is being written. It is there once [`finish`](Self::finish) has returned; if this is dropped before, what
/// was sent is given up.
#[derive(Debug)]
pub(crate) struct Upload {
    connection: Arc<Connection>,
    path: PathBuf,
    key: Key,
    at_once: usize,
    filled: Vec<u8>,
    wanted: u64,
    written: u64,
    begun: Option<Box<dyn MultipartUpload>>,
    in_flight: VecDeque<Waiting<()>>,
}

impl Upload {
    pub(super) fn new(store: &Store, path: PathBuf, wanted: u64) -> Result<Self, CheckpointError> {
        let begin = || Ok((store.connection()?, key_of(&path)?));
        let (connection, key) = begin().map_err(failed("write", &path))?;
        Ok(Self {
            connection,
            key,
            at_once: sent_bytes(wanted) as usize,
            filled: Vec::new(),
            wanted,
            written: 0,
            begun: None,
            in_flight: VecDeque::new(),
            path,
        })
    }

    /// Takes the next bytes, and waits while too many are on their way.
    pub(crate) fn write(&mut self, mut bytes: &[u8]) -> Result<(), CheckpointError> {
        self.written += bytes.len() as u64;
        while !bytes.is_empty() {
            if self.filled.len() == self.at_once {
                self.send()?; // only now, since what is left at the end may be the whole object
            }
            if self.filled.capacity() == 0 {
                let left = self.wanted.min(self.at_once as u64) as usize;
                self.filled.reserve_exact(left);
            }
            let room = self.at_once - self.filled.len();
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.filled.extend_from_slice(now);
            bytes = later;
        }
        Ok(())
    }

    /// Waits until all is there.
    pub(crate) fn finish(mut self) -> Result<(), CheckpointError> {
        debug_assert_eq!(self.written, self.wanted, "all bytes have come");
        if self.begun.is_none() {
            let (bucket, key) = (self.connection.bucket.clone(), self.key.clone());
            let payload = PutPayload::from(std::mem::take(&mut self.filled));
            let put = async move { bucket.put(&key, payload).await.map(|_| ()) };
            let put = self.connection.runtime.start(put).wait();
            return put.map_err(|error| self.failed(error));
        }
        self.send()?;
        while let Some(part) = self.in_flight.pop_front() {
            part.wait().map_err(|error| self.failed(error))?;
        }
        let Some(mut upload) = self.begun.take() else {
            return Ok(());
        };
        // It comes back in any case, so that it can be aborted.
        let complete = async move {
            let completed = upload.complete().await;
            Ok((upload, completed))
        };
        let (upload, completed) = self
            .connection
            .runtime
            .start(complete)
            .wait()
            .map_err(|error| self.failed(error))?;
        completed.map(|_| ()).map_err(|error| {
            self.begun = Some(upload);
            self.failed(StoreError::Answer(error))
        })
    }

    /// Sends what has been filled.
    fn send(&mut self) -> Result<(), CheckpointError> {
        if self.begun.is_none() {
            let (bucket, key) = (self.connection.bucket.clone(), self.key.clone());
            let create = async move { bucket.put_multipart(&key).await };
            let created = self.connection.runtime.start(create).wait();
            self.begun = Some(created.map_err(|error| self.failed(error))?);
        }
        if self.in_flight.len() == IN_FLIGHT
            && let Some(first) = self.in_flight.pop_front()
        {
            first.wait().map_err(|error| self.failed(error))?;
        }
        let payload = PutPayload::from(std::mem::take(&mut self.filled));
        if let Some(upload) = &mut self.begun {
            let part = upload.put_part(payload);
            self.in_flight
                .push_back(self.connection.runtime.start(part));
        }
        Ok(())
    }

    fn failed(&self, source: StoreError) -> CheckpointError {
        failed("write", &self.path)(source)
    }
}

impl Drop for Upload {
    /// Gives up what is not complete. The error that is told is the one that came first.
    fn drop(&mut self) {
        let Some(mut upload) = self.begun.take() else {
            return;
        };
        for part in self.in_flight.drain(..) {
            part.wait().ok(); // a part that comes later would stay
        }
        let abort = async move { upload.abort().await };
        self.connection.runtime.start(abort).wait().ok();
    }
}
