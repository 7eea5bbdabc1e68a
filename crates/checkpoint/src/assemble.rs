//! The manifest of what ranks have written. Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::manifest::{
    Alias, Degrees, FORMAT_VERSION, Manifest, ManifestError, PartFile, Placement, Tensor,
};
use crate::part::PartReport;

/// What a manifest says besides files and tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// The version of the library that writes it.
    pub library_version: String,
    /// The step of the training, where it is known.
    pub step: Option<u64>,
    /// Of the job.
    pub degrees: Degrees,
    /// Where the modules are.
    pub partition: Vec<Placement>,
    /// Further names of tensors.
    pub aliases: Vec<Alias>,
    /// What else the job keeps. Its numbers are those of JSON: of 64 bits, none infinite.
    pub user_content: Value,
}

/// Why the parts do not make a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AssembleError {
    /// Two ranks say different things of a tensor.
    #[error(
        "tensor {tensor:?} has type {} and shape {:?} in {} and type {} and shape {:?} in {}",
        first.dtype, first.shape, first.file, second.dtype, second.shape, second.file
    )]
    Disagreement {
        /// The tensor's name.
        tensor: String,
        /// What one file says.
        first: Box<Said>,
        /// What another one says.
        second: Box<Said>,
    },
    /// Together they make no valid manifest: tensors are not whole, or two ranks wrote the same.
    #[error("the parts do not make a checkpoint{}: {source}", of(.tensor.as_deref(), .files))]
    Manifest {
        /// The tensor, where it is about one.
        tensor: Option<String>,
        /// The files that hold some of it.
        files: Vec<String>,
        /// What is wrong.
        source: ManifestError,
    },
}

/// What a file says of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    /// The file.
    pub file: String,
    /// The type of the tensor's elements.
    pub dtype: safetensors::Dtype,
    /// Its shape.
    pub shape: Vec<u64>,
}

fn of(tensor: Option<&str>, files: &[String]) -> String {
    match tensor {
        Some(name) => format!(" of tensor {name:?} (in {})", files.join(", ")),
        None => String::new(),
    }
}

/// The manifest of all parts.
pub fn assemble(
    tag: &str,
    sequence: u64,
    description: Description,
    mut parts: Vec<PartReport>,
) -> Result<Manifest, AssembleError> {
    parts.sort_by(|a, b| a.file.name.cmp(&b.file.name));
    let files: Vec<PartFile> = parts.iter().map(|part| part.file.clone()).collect();
    let mut tensors: BTreeMap<String, (usize, Tensor)> = BTreeMap::new();
    for (file, part) in parts.into_iter().enumerate() {
        for mut tensor in part.tensors {
            for piece in &mut tensor.pieces {
                piece.file = file;
            }
            let Some((first, known)) = tensors.get_mut(&tensor.name) else {
                tensors.insert(tensor.name.clone(), (file, tensor));
                continue;
            };
            if known.dtype != tensor.dtype || known.shape != tensor.shape {
                let said = |file: usize, tensor: &Tensor| {
                    Box::new(Said {
                        file: files[file].name.clone(),
                        dtype: tensor.dtype,
                        shape: tensor.shape.clone(),
                    })
                };
                return Err(AssembleError::Disagreement {
                    first: said(*first, known),
                    second: said(file, &tensor),
                    tensor: tensor.name,
                });
            }
            known.pieces.append(&mut tensor.pieces);
        }
    }
    let mut tensors: Vec<Tensor> = tensors.into_values().map(|(_, tensor)| tensor).collect();
    for tensor in &mut tensors {
        let shape = &tensor.shape;
        let order = |piece: &crate::Piece| (piece.region.hull(shape), piece.file, piece.bytes);
        tensor.pieces.sort_by_cached_key(order);
    }
    let Description {
        library_version,
        step,
        degrees,
        mut partition,
        mut aliases,
        user_content,
    } = description;
    partition.sort_by(|a, b| a.module.cmp(&b.module));
    aliases.sort_by(|a, b| a.name.cmp(&b.name));
    let manifest = Manifest {
        format_version: FORMAT_VERSION,
        library_version,
        tag: tag.to_owned(),
        sequence,
        step,
        degrees,
        partition,
        files,
        tensors,
        aliases,
        user_content,
    };
    checked(manifest)
}

fn checked(manifest: Manifest) -> Result<Manifest, AssembleError> {
    let Err(source) = manifest.check() else {
        return Ok(manifest);
    };
    let ManifestError::Value { path, .. } = &source else {
        unreachable!("a check finds wrong values only");
    };
    // The place in a list says little to whoever gave names.
    let number = path.strip_prefix("tensors[").and_then(|rest| {
        let (number, _) = rest.split_once(']')?;
        number.parse::<usize>().ok()
    });
    let tensor = number.map(|number| &manifest.tensors[number]);
    let pieces = tensor.into_iter().flat_map(|tensor| &tensor.pieces);
    let mut files: Vec<String> = pieces
        .filter_map(|piece| manifest.files.get(piece.file))
        .map(|file| file.name.clone())
        .collect();
    files.dedup();
    Err(AssembleError::Manifest {
        tensor: tensor.map(|tensor| tensor.name.clone()),
        files,
        source,
    })
}
