//! Parts that threads write, out of copies of their bytes, while the caller goes on.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::chunks::lock;
use crate::directory::Directory;
use crate::error::CheckpointError;
use crate::part::{PartReport, PieceSpec, PieceView, checked_bytes, lay_out_specs};
use crate::write::{check_part, path_of, refused, write_part};

/// What has to do with parts that are written in the background: memory for their copies, which is used again, and failures
/// that nobody has heard of yet.
#[derive(Clone, Debug, Default)]
pub struct Background(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    free: Vec<Vec<u8>>,
    begun: Vec<Arc<Shared>>,
}

/// A part that a thread writes.
#[derive(Debug)]
pub struct PartInBackground(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    result: Mutex<Option<Result<PartReport, Arc<CheckpointError>>>>,
    ended: Condvar,
    heard: AtomicBool,
}

impl Background {
    /// Copies the pieces, and lets a thread write them: what [`write_part`] does, after this has returned. The copy goes into
    /// memory of earlier parts where that is large enough.
    ///
    /// # Errors
    ///
    /// An earlier part could not be written, and nobody has waited for it; or a piece makes no sense.
    pub fn write_part(
        &self,
        directory: &Directory,
        tag: &str,
        name: &str,
        pieces: &[PieceView<'_>],
    ) -> Result<PartInBackground, CheckpointError> {
        check_part(directory, tag, name, pieces)?;
        let specs: Vec<_> = pieces.iter().map(PieceView::spec).collect();
        let mut copy = self.begin_part(directory, tag, name, &specs)?;
        for piece in pieces {
            copy.write(piece.bytes);
        }
        copy.finish()
    }

    /// What [`write_part`](Self::write_part) does, for pieces whose bytes come one after another: they are copied by
    /// [`PartCopy::write`], in the given order.
    ///
    /// # Errors
    ///
    /// Those of [`write_part`](Self::write_part).
    pub fn begin_part(
        &self,
        directory: &Directory,
        tag: &str,
        name: &str,
        pieces: &[PieceSpec<'_>],
    ) -> Result<PartCopy, CheckpointError> {
        self.raise_unheard()?;
        let path = path_of(directory, tag, name)?;
        lay_out_specs(pieces).map_err(refused(&path))?;
        let owned = pieces.iter().map(|piece| {
            let nbytes = checked_bytes(piece).map_err(refused(&path))?;
            Ok(Owned::of(piece, nbytes as usize))
        });
        let pieces: Vec<Owned> = owned.collect::<Result<_, CheckpointError>>()?;
        let needed = pieces.iter().map(|piece| piece.nbytes).sum();
        Ok(PartCopy {
            background: self.clone(),
            directory: directory.clone(),
            tag: tag.to_owned(),
            name: name.to_owned(),
            pieces,
            needed,
            memory: self.take(needed),
        })
    }

    /// Gives up memory that no part is written from now.
    pub fn free_memory(&self) {
        self.lock().free.clear();
    }

    /// An error of an earlier part is told once: to whoever waits for the part, or here.
    fn raise_unheard(&self) -> Result<(), CheckpointError> {
        let mut state = self.lock();
        let mut unheard = None;
        state.begun.retain(|part| match &*lock(&part.result) {
            None => true,
            Some(Ok(_)) => false,
            Some(Err(error)) => {
                if !part.heard.load(Ordering::Acquire) && unheard.is_none() {
                    unheard = Some(Arc::clone(error));
                }
                false
            }
        });
        match unheard {
            Some(error) => Err(CheckpointError::Earlier(error)),
            None => Ok(()),
        }
    }

    /// Empty memory for so many bytes: the smallest that is large enough, or the largest, grown.
    fn take(&self, needed: usize) -> Vec<u8> {
        let mut state = self.lock();
        state.free.sort_by_key(Vec::capacity);
        let large = state.free.partition_point(|one| one.capacity() < needed);
        let place = large.min(state.free.len().saturating_sub(1));
        let mut memory = if state.free.is_empty() {
            Vec::new()
        } else {
            state.free.remove(place)
        };
        drop(state);
        memory.clear();
        if memory.capacity() < needed {
            memory = Vec::with_capacity(needed); // the old one is gone first, and nothing of it is copied
        }
        memory
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        lock(&self.0)
    }
}

/// The copy of a part, while its bytes come.
#[derive(Debug)]
pub struct PartCopy {
    background: Background,
    directory: Directory,
    tag: String,
    name: String,
    pieces: Vec<Owned>,
    needed: usize,
    memory: Vec<u8>,
}

impl PartCopy {
    /// How many bytes are still to come.
    pub fn left(&self) -> u64 {
        (self.needed - self.memory.len()) as u64
    }

    /// Takes the next bytes; at most those that are [`left`](Self::left).
    pub fn write(&mut self, bytes: &[u8]) {
        self.memory.extend_from_slice(bytes);
    }

    /// Lets a thread write the part, after all bytes have come.
    ///
    /// # Errors
    ///
    /// There is no thread.
    pub fn finish(self) -> Result<PartInBackground, CheckpointError> {
        debug_assert_eq!(self.left(), 0, "all bytes have come");
        let Self {
            background,
            directory,
            tag,
            name,
            pieces,
            memory,
            ..
        } = self;
        let shared = Arc::new(Shared::default());
        let (begun, outcome) = (background.clone(), Arc::clone(&shared));
        let writing = move || {
            let mut ends = Ends(outcome, None);
            let mut rest = &*memory;
            let views = pieces.iter().map(|piece| {
                let (bytes, later) = rest.split_at(piece.nbytes);
                rest = later;
                piece.view(bytes)
            });
            let views: Vec<_> = views.collect();
            let result = write_part(&directory, &tag, &name, &views);
            background.lock().free.push(memory);
            ends.1 = Some(result);
        };
        let thread = thread::Builder::new().name("checkpoint-write".to_owned());
        thread
            .spawn(writing)
            .map_err(|source| CheckpointError::NoThread { source })?;
        begun.lock().begun.push(Arc::clone(&shared));
        Ok(PartInBackground(shared))
    }
}

impl PartInBackground {
    /// Whether it has been written, or failed.
    pub fn is_done(&self) -> bool {
        lock(&self.0.result).is_some()
    }

    /// Waits until it has been written: what [`write_part`] returned. It can be called again.
    pub fn wait(&self) -> Result<PartReport, Arc<CheckpointError>> {
        loop {
            if let Some(result) = self.wait_for(Duration::from_mins(1)) {
                return result;
            }
        }
    }

    /// Waits for so long at most; `None` if it is not written then.
    pub fn wait_for(&self, time: Duration) -> Option<Result<PartReport, Arc<CheckpointError>>> {
        let result = lock(&self.0.result);
        let waited = self
            .0
            .ended
            .wait_timeout_while(result, time, |result| result.is_none());
        let (result, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if result.is_some() {
            self.0.heard.store(true, Ordering::Release);
        }
        result.clone()
    }
}

/// Ends a part's waiters also where its thread panics.
struct Ends(Arc<Shared>, Option<Result<PartReport, CheckpointError>>);

impl Drop for Ends {
    fn drop(&mut self) {
        let ended = self.1.take().unwrap_or(Err(CheckpointError::Panicked));
        *lock(&self.0.result) = Some(ended.map_err(Arc::new));
        self.0.ended.notify_all();
    }
}

/// A piece whose bytes are in the copy.
#[derive(Debug)]
struct Owned {
    name: String,
    shape: Vec<u64>,
    dtype: safetensors::Dtype,
    region: crate::region::Region,
    nbytes: usize,
}

impl Owned {
    fn of(piece: &PieceSpec<'_>, nbytes: usize) -> Self {
        Self {
            name: piece.name.to_owned(),
            shape: piece.shape.to_vec(),
            dtype: piece.dtype,
            region: piece.region.clone(),
            nbytes,
        }
    }

    fn view<'a>(&'a self, bytes: &'a [u8]) -> PieceView<'a> {
        PieceView {
            name: &self.name,
            dtype: self.dtype,
            shape: &self.shape,
            region: self.region.clone(),
            bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Background;

    #[test]
    fn memory_is_used_again_the_smallest_that_is_large_enough() {
        let background = Background::default();
        let [small, large] = [100, 5000].map(|bytes| background.take(bytes));
        let (at_small, at_large) = (small.as_ptr(), large.as_ptr());
        background.lock().free.extend([large, small]);
        let first = background.take(60);
        assert_eq!(first.as_ptr(), at_small);
        let again = background.take(60); // only the large one is left
        assert_eq!(again.as_ptr(), at_large);
        assert!(again.is_empty());
        background.lock().free.push(again);
        assert!(background.take(6000).capacity() >= 6000);
        assert!(background.lock().free.is_empty()); // the large one made room
    }
}
