//! Chunks that are read, verified and handed on, by two threads.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use crate::error::CheckpointError;
use crate::hash::CHUNK_BYTES;
use crate::read::Checkpoint;

/// Where a part of a chunk goes.
pub(crate) struct Slot<'a> {
    pub(crate) from: usize,
    pub(crate) into: &'a mut [u8],
}

/// By file and number of the chunk.
pub(crate) type Chunks<'a> = BTreeMap<(usize, u64), Vec<Slot<'a>>>;

/// Reads and verifies chunks in their order. A second thread takes part, so that the disk works while a chunk is
/// hashed; the error is that of the first chunk that has one.
pub(crate) fn read_chunks(
    checkpoint: &Checkpoint,
    chunks: Chunks<'_>,
) -> Result<(), CheckpointError> {
    let alone = chunks.len() <= 1;
    let queue = Mutex::new(chunks.into_iter());
    let failed = AtomicBool::new(false);
    let work = || {
        let mut reader = ChunkReader::new(checkpoint);
        while !failed.load(Ordering::Relaxed) {
            let next = lock(&queue).next();
            let Some((place, slots)) = next else {
                break;
            };
            if let Err(error) = reader.read(place, slots) {
                failed.store(true, Ordering::Relaxed);
                return Err((place, error));
            }
        }
        Ok(())
    };
    let results = thread::scope(|scope| {
        let reading = thread::Builder::new().name("checkpoint-read".to_owned());
        let second = if alone {
            None
        } else {
            reading.spawn_scoped(scope, work).ok() // it goes without
        };
        let first = work();
        let second = second.map(|second| second.join().expect("reading does not panic"));
        [first, second.unwrap_or(Ok(()))]
    });
    let errors = results.into_iter().filter_map(Result::err);
    match errors.min_by_key(|(place, _)| *place) {
        Some((_, error)) => Err(error),
        None => Ok(()),
    }
}

/// Reads one chunk after another.
struct ChunkReader<'a> {
    checkpoint: &'a Checkpoint,
    open: Option<(usize, File)>,
    memory: Vec<u8>,
}

impl<'a> ChunkReader<'a> {
    fn new(checkpoint: &'a Checkpoint) -> Self {
        Self {
            checkpoint,
            open: None,
            memory: Vec::new(),
        }
    }

    /// Reads a chunk, and copies what is wanted of it; all of it is read into where it is wanted.
    fn read(
        &mut self,
        (number, chunk): (usize, u64),
        mut slots: Vec<Slot<'_>>,
    ) -> Result<(), CheckpointError> {
        let file = match self.open.take() {
            Some((same, file)) if same == number => file,
            _ => self.checkpoint.open_file(number)?,
        };
        let range = self.checkpoint.range(number, chunk);
        let length = (range.end - range.start) as usize;
        if let [slot] = &mut slots[..]
            && slot.into.len() == length
        {
            self.checkpoint
                .read_chunk(&file, number, chunk, slot.into)?;
        } else {
            self.memory.resize(CHUNK_BYTES as usize, 0);
            self.checkpoint
                .read_chunk(&file, number, chunk, &mut self.memory[..length])?;
            for slot in slots {
                let from = slot.from..slot.from + slot.into.len();
                slot.into.copy_from_slice(&self.memory[from]);
            }
        }
        self.open = Some((number, file));
        Ok(())
    }
}

/// A panic of another thread leaves what is guarded here in order.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
