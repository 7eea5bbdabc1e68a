//! Chunks that are read, verified and handed on, by several threads.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use crate::error::CheckpointError;
use crate::files::OpenFile;
use crate::read::Checkpoint;
use crate::stretches::{Stretch, stretches, within};

/// Where a part of a chunk goes.
pub(crate) struct Slot<'a> {
    pub(crate) from: usize,
    pub(crate) into: &'a mut [u8],
}

/// By file and number of the chunk.
pub(crate) type Chunks<'a> = BTreeMap<(usize, u64), Vec<Slot<'a>>>;

/// Reads and verifies chunks in their order. Further threads take part, so that the disk or the store works while a chunk is
/// hashed; the error is that of the first chunk that has one.
pub(crate) fn read_chunks(
    checkpoint: &Checkpoint,
    chunks: Chunks<'_>,
) -> Result<(), CheckpointError> {
    let reading = checkpoint.files().pace();
    let stretches = stretches(chunks, reading.chunks);
    let further = reading.threads.min(stretches.len()).saturating_sub(1);
    let queue = Mutex::new(stretches.into_iter());
    let failed = AtomicBool::new(false);
    let work = || {
        let mut reader = ChunkReader::new(checkpoint);
        while !failed.load(Ordering::Relaxed) {
            let next = lock(&queue).next();
            let Some(stretch) = next else {
                break;
            };
            let place = stretch[0].0;
            if let Err(error) = reader.read(stretch) {
                failed.store(true, Ordering::Relaxed);
                return Err((place, error));
            }
        }
        Ok(())
    };
    let results: Vec<Result<(), _>> = thread::scope(|scope| {
        let start = |_| {
            let reading = thread::Builder::new().name("checkpoint-read".to_owned());
            reading.spawn_scoped(scope, work).ok() // it goes without
        };
        let others: Vec<_> = (0..further).filter_map(start).collect();
        let mut results = vec![work()];
        let joined = others.into_iter();
        results.extend(joined.map(|other| other.join().expect("reading does not panic")));
        results
    });
    let errors = results.into_iter().filter_map(Result::err);
    match errors.min_by_key(|(place, _)| *place) {
        Some((_, error)) => Err(error),
        None => Ok(()),
    }
}

/// Reads one stretch after another.
struct ChunkReader<'a> {
    checkpoint: &'a Checkpoint,
    open: Option<(usize, OpenFile)>,
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

    /// Reads chunks, and copies what is wanted of them; all of one is read into where it is wanted.
    fn read(&mut self, mut stretch: Stretch<Vec<Slot<'_>>>) -> Result<(), CheckpointError> {
        let ((number, first), _) = stretch[0];
        let ((_, last), _) = stretch[stretch.len() - 1];
        let file = match self.open.take() {
            Some((same, file)) if same == number => file,
            _ => self.checkpoint.open_file(number)?,
        };
        let begin = self.checkpoint.range(number, first).start;
        let length = (self.checkpoint.range(number, last).end - begin) as usize;
        if let [(_, slots)] = &mut stretch[..]
            && let [slot] = &mut slots[..]
            && slot.into.len() == length
        {
            self.checkpoint
                .read_chunk(&file, number, first, slot.into)?;
        } else {
            if self.memory.len() < length {
                self.memory.resize(length, 0);
            }
            let memory = &mut self.memory[..length];
            self.checkpoint.read_at(&file, number, begin, memory)?;
            for (place, ((_, chunk), slots)) in stretch.into_iter().enumerate() {
                let bytes = &memory[within(place, length)];
                self.checkpoint.verify_chunk(number, chunk, bytes)?;
                for slot in slots {
                    let from = slot.from..slot.from + slot.into.len();
                    slot.into.copy_from_slice(&bytes[from]);
                }
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
