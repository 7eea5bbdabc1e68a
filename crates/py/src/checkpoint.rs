//! `CheckpointWriter` and `CheckpointReader`: parts of checkpoints out of tensors' memory and into it, without copies.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use shardwright_checkpoint::{
    Checkpoint, CheckpointError, Difference, Directory, DirectoryLock, PartReport, PartWriter,
    TensorKind, Touched, Wanted, abandon, checked_tag, commit, differences, remove_unfinished,
    write_part,
};

use crate::arguments::duration;
use crate::checkpoint_background::{CheckpointMemory, PartInBackground};
use crate::checkpoint_incoming::{IncomingCopy, IncomingPart};
use crate::checkpoint_pieces::{
    Described, Given, Memory, Part, check_apart, given, known_dtype, region, specs, views,
};
use crate::error::{argument_error, checkpoint_error};
use crate::raw;

/// A report for `commit`.
pub(crate) fn report_text(report: &PartReport) -> String {
    serde_json::to_string(report).expect("names and numbers are JSON")
}

/// How long a job that waits for another one sleeps between looks.
const LOCK_PAUSE: Duration = Duration::from_millis(50);

/// Writes a checkpoint: every rank its part, then one rank the manifest.
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct CheckpointWriter {
    directory: Directory,
    tag: String,
    lock: Mutex<Option<DirectoryLock>>,
}

#[pymethods]
impl CheckpointWriter {
    /// For the checkpoint `tag` in the directory `path`, or at `s3://BUCKET/PREFIX`; nothing is written or asked yet.
    ///
    /// Raises `ShardwrightError` for a tag that no folder can be named after.
    #[new]
    #[pyo3(signature = (path, tag))]
    fn new(path: PathBuf, tag: String) -> PyResult<Self> {
        checked_tag(&tag).map_err(|error| checkpoint_error(&error))?;
        Ok(Self {
            directory: Directory::new(path).map_err(|error| checkpoint_error(&error))?,
            tag,
            lock: Mutex::default(),
        })
    }

    /// Raise `ShardwrightError` if an object store does not answer, has no such bucket, or refuses who asks.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.directory.check())
            .map_err(|error| checkpoint_error(&error))
    }

    /// Keep other jobs from saving into this directory until `unlock`, or until this process ends. Waits for one that does.
    ///
    /// Raises `ShardwrightError` after so many seconds.
    #[pyo3(signature = (seconds))]
    fn lock(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        let deadline = Instant::now() + duration("seconds", seconds)?;
        loop {
            let lock = py.detach(|| self.directory.try_lock());
            if let Some(lock) = lock.map_err(|error| checkpoint_error(&error))? {
                // What cannot be listed is told by the save itself.
                py.detach(|| remove_unfinished(&self.directory, &lock, &self.tag))
                    .ok();
                *self.lock.lock().unwrap_or_else(PoisonError::into_inner) = Some(lock);
                return Ok(());
            }
            if Instant::now() >= deadline {
                let error = CheckpointError::Busy {
                    path: self.directory.path().to_owned(),
                    seconds,
                };
                return Err(checkpoint_error(&error));
            }
            py.detach(|| thread::sleep(LOCK_PAUSE));
            py.check_signals()?;
        }
    }

    /// Let other jobs save into this directory.
    fn unlock(&self) {
        *self.lock.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Write this rank's file, down to the disk, while other Python threads run: the report for `commit`.
    ///
    /// A piece is the tensor's global name, its contiguous elements in host memory, the shape of the whole tensor, and what
    /// the piece is of it: offset, size, and of that box the first element and the number of a run of them, or None. The
    /// elements must not change meanwhile. Raises `ShardwrightError`, and leaves no file.
    #[pyo3(signature = (name, pieces))]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 hands arguments over")]
    fn write_part(&self, py: Python<'_>, name: &str, pieces: Vec<Given<'_>>) -> PyResult<String> {
        let given = given(&pieces)?;
        let views = views(&given);
        let report = py
            .detach(|| write_part(&self.directory, &self.tag, name, &views))
            .map_err(|error| checkpoint_error(&error))?;
        Ok(report_text(&report))
    }

    /// Copy the pieces into `memory`, and let a thread do what `write_part` does. The elements can change once this has
    /// returned.
    ///
    /// Raises `ShardwrightError` for pieces that make no sense, and if an earlier part out of this memory could not be written
    /// and nobody has waited for it.
    #[pyo3(signature = (name, pieces, memory))]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 hands arguments over")]
    fn write_part_in_background(
        &self,
        py: Python<'_>,
        name: &str,
        pieces: Vec<Given<'_>>,
        memory: &CheckpointMemory,
    ) -> PyResult<PartInBackground> {
        let given = given(&pieces)?;
        let views = views(&given);
        py.detach(|| {
            let background = memory.background();
            background.write_part(&self.directory, &self.tag, name, &views)
        })
        .map(PartInBackground::new)
        .map_err(|error| checkpoint_error(&error))
    }

    /// Begin this rank's file, whose bytes come one after another, such as those of a device: name, dtype, shape of the whole
    /// tensor and part of each piece. Raises `ShardwrightError`, and leaves no file.
    #[pyo3(signature = (name, pieces))]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 hands arguments over")]
    fn begin_part(
        &self,
        py: Python<'_>,
        name: &str,
        pieces: Vec<Described>,
    ) -> PyResult<IncomingPart> {
        let specs = specs(&pieces)?;
        py.detach(|| PartWriter::begin(&self.directory, &self.tag, name, &specs))
            .map(IncomingPart::new)
            .map_err(|error| checkpoint_error(&error))
    }

    /// What `write_part_in_background` does, for pieces whose bytes come one after another: those of `begin_part`.
    #[pyo3(signature = (name, pieces, memory))]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 hands arguments over")]
    fn begin_part_in_background(
        &self,
        py: Python<'_>,
        name: &str,
        pieces: Vec<Described>,
        memory: &CheckpointMemory,
    ) -> PyResult<IncomingCopy> {
        let specs = specs(&pieces)?;
        py.detach(|| {
            let background = memory.background();
            background.begin_part(&self.directory, &self.tag, name, &specs)
        })
        .map(IncomingCopy::new)
        .map_err(|error| checkpoint_error(&error))
    }

    /// Complete the checkpoint out of all ranks' reports, in one step, and make it the newest: the tags of older ones that
    /// were removed to leave `keep`.
    ///
    /// `description` is a JSON object: `library_version`, `step`, `degrees`, `partition`, `aliases`, `user_content`.
    #[pyo3(signature = (description, reports, *, keep=None))]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 hands arguments over")]
    fn commit(
        &self,
        py: Python<'_>,
        description: &str,
        reports: Vec<String>,
        keep: Option<NonZeroU32>,
    ) -> PyResult<Vec<String>> {
        let description = serde_json::from_str(description).map_err(argument_error)?;
        let reports = reports.iter().map(|report| serde_json::from_str(report));
        let reports: Vec<PartReport> = reports.collect::<Result<_, _>>().map_err(argument_error)?;
        py.detach(|| commit(&self.directory, &self.tag, description, reports, keep))
            .map(|committed| committed.removed)
            .map_err(|error| checkpoint_error(&error))
    }

    /// Remove what was written of a checkpoint that will not be completed.
    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| abandon(&self.directory, &self.tag))
            .map_err(|error| checkpoint_error(&error))
    }
}

/// Reads a complete checkpoint.
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct CheckpointReader(Checkpoint);

#[pymethods]
impl CheckpointReader {
    /// Open the checkpoint `tag` of the directory `path`, or the newest. Raises `ShardwrightError` that names what is missing
    /// or damaged; elements are verified where they are read.
    #[new]
    #[pyo3(signature = (path, tag=None))]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 hands arguments over")]
    fn new(py: Python<'_>, path: PathBuf, tag: Option<&str>) -> PyResult<Self> {
        py.detach(|| Checkpoint::locate(&path, tag))
            .map(Self)
            .map_err(|error| checkpoint_error(&error))
    }

    /// The manifest, as JSON.
    #[getter]
    fn manifest(&self) -> String {
        serde_json::to_string(self.0.manifest()).expect("names and numbers are JSON")
    }

    /// How these tensors (name, dtype, shape) differ from the checkpoint's, a line for each difference.
    #[pyo3(signature = (wanted, /))]
    fn differences(&self, wanted: Vec<(String, String, Vec<u64>)>) -> PyResult<Vec<String>> {
        let wanted = wanted.into_iter().map(|(name, dtype, shape)| {
            let dtype = known_dtype(&name, &dtype)?;
            Ok((name, TensorKind { dtype, shape }))
        });
        let wanted: BTreeMap<_, _> = wanted.collect::<PyResult<_>>()?;
        let found = differences(&wanted, self.0.manifest());
        Ok(found.iter().map(Difference::to_string).collect())
    }

    /// Read into contiguous tensors in host memory, while other Python threads run: how many files, chunks and bytes were
    /// touched.
    ///
    /// Each is a name, the tensor that takes the elements, and what is wanted: offset, size, and of that box the first
    /// element and the number of a run of them, or None. After an error the tensors hold anything.
    #[pyo3(signature = (wanted, /))]
    fn read(
        &self,
        py: Python<'_>,
        wanted: Vec<(String, Bound<'_, PyAny>, Part)>,
    ) -> PyResult<(u64, u64, u64)> {
        let given = wanted.into_iter().map(|(name, tensor, part)| {
            let memory = Memory::of(&name, &tensor)?;
            let saved = self.0.manifest().tensor(&name);
            if let Some(saved) = saved.filter(|saved| saved.dtype != memory.dtype) {
                return Err(argument_error(format!(
                    "tensor {name:?} was saved as {} and is wanted as {}",
                    saved.dtype, memory.dtype
                )));
            }
            Ok((name, memory, part))
        });
        let mut given: Vec<_> = given.collect::<PyResult<_>>()?;
        check_apart(&given)?;
        let wanted = given.iter_mut().map(|(name, memory, part)| Wanted {
            name,
            region: region(part.clone()),
            into: raw::bytes_into(&mut memory.tensor, memory.address, memory.nbytes),
        });
        let wanted = wanted.collect();
        let touched = py
            .detach(|| self.0.read(wanted))
            .map_err(|error: CheckpointError| checkpoint_error(&error))?;
        let Touched {
            files,
            chunks,
            bytes,
        } = touched;
        Ok((files, chunks, bytes))
    }

    /// Read all files: what is not as it was written, a line for each.
    fn verify(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let damages = py
            .detach(|| self.0.verify(|_| {}))
            .map_err(|error| checkpoint_error(&error))?;
        Ok(damages.iter().map(ToString::to_string).collect())
    }
}

/// The tag of the checkpoint that was completed last in a directory; None if there is none. Raises `ShardwrightError` if the
/// file that says so was changed.
#[pyfunction]
pub(crate) fn newest_checkpoint(py: Python<'_>, path: PathBuf) -> PyResult<Option<String>> {
    py.detach(|| Directory::new(path)?.newest())
        .map_err(|error| checkpoint_error(&error))
}

/// Make a checkpoint of a directory the newest.
#[pyfunction]
pub(crate) fn set_newest_checkpoint(py: Python<'_>, path: PathBuf, tag: &str) -> PyResult<()> {
    py.detach(|| Directory::new(path)?.set_newest(tag))
        .map_err(|error| checkpoint_error(&error))
}

/// Whether a path is an address in an object store, such as `s3://BUCKET/PREFIX`. Raises `ShardwrightError` for addresses of
/// other kinds, and for an empty path.
#[pyfunction]
pub(crate) fn is_in_store(path: PathBuf) -> PyResult<bool> {
    let directory = Directory::new(path).map_err(|error| checkpoint_error(&error))?;
    Ok(directory.is_in_store())
}
