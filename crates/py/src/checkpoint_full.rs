//! The model of a checkpoint in the layout of the Hugging Face libraries.

use std::path::{Path, PathBuf};

use pyo3::prelude::*;
use shardwright_checkpoint::{Checkpoint, ExportOptions, export_full};

use crate::error::checkpoint_error;

/// Write the model of the checkpoint `tag` in the directory `path` into the new folder `out`, as `shardwright checkpoint
/// export --full` does, while other Python threads run: the names of the files with tensors.
///
/// Tensors are streamed. Raises `ShardwrightError`, and leaves nothing of the folder.
#[pyfunction]
#[pyo3(signature = (path, tag, out, max_shard_bytes))]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 hands arguments over")]
pub(crate) fn export_full_checkpoint(
    py: Python<'_>,
    path: PathBuf,
    tag: &str,
    out: PathBuf,
    max_shard_bytes: u64,
) -> PyResult<Vec<String>> {
    let options = ExportOptions {
        max_shard_bytes,
        replace: false,
    };
    let export = |path: &Path, out: &Path| {
        let checkpoint = Checkpoint::locate(path, Some(tag))?;
        export_full(&checkpoint, out, options, &mut |_| {})
    };
    py.detach(|| export(&path, &out))
        .map(|exported| exported.files)
        .map_err(|error| checkpoint_error(&error))
}
