//! The manifest: what a checkpoint holds, and where. Pure.

mod check;
mod seal;

use std::num::NonZeroU32;

use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::hash::ChunkHash;
use crate::region::{Region, num_elements};

pub use seal::seal;

/// The newest format of [`Manifest`].
pub const FORMAT_VERSION: u32 = 1;

/// What a checkpoint holds, and where.
///
/// Everything that has a name is listed in the order of names, without any twice, so that a manifest has one form only.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The format; see [`FORMAT_VERSION`].
    pub format_version: u32,
    /// The version of the library that wrote it.
    pub library_version: String,
    /// The checkpoint's name.
    pub tag: String,
    /// Counts the checkpoints of a directory in the order of their writing.
    pub sequence: u64,
    /// The step of the training, where it is known.
    pub step: Option<u64>,
    /// Of the job that wrote it.
    pub degrees: Degrees,
    /// Where the modules were.
    pub partition: Vec<Placement>,
    /// The files with the tensors.
    pub files: Vec<PartFile>,
    /// The tensors.
    pub tensors: Vec<Tensor>,
    /// Further names of tensors.
    pub aliases: Vec<Alias>,
    /// What else the job keeps, as its codec wrote it.
    pub user_content: Value,
}

/// Over how many ranks things were divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Degrees {
    /// The stages of the pipeline.
    pub pipeline: NonZeroU32,
    /// Tensor parallelism.
    pub tensor: NonZeroU32,
    /// Ranks with the same parameters, on different data.
    pub reduced_data: NonZeroU32,
    /// The optimizer's state, among those.
    pub optimizer_sharding: NonZeroU32,
    /// The parameters, among those.
    pub sharded_data: NonZeroU32,
}

impl Degrees {
    /// Of a job with one rank.
    pub const ONE: Self = Self {
        pipeline: NonZeroU32::MIN,
        tensor: NonZeroU32::MIN,
        reduced_data: NonZeroU32::MIN,
        optimizer_sharding: NonZeroU32::MIN,
        sharded_data: NonZeroU32::MIN,
    };
}

/// Where a module was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    /// Its global name.
    pub module: String,
    /// Its stage of the pipeline.
    pub pp_rank: u32,
}

/// A file with tensors, of the safetensors format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartFile {
    /// Its name in the checkpoint's folder.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// Where its data begin, behind the header.
    pub data_begin: u64,
    /// Of each [`CHUNK_BYTES`](crate::CHUNK_BYTES) of it, and of what is left at its end.
    pub chunks: Vec<ChunkHash>,
}

/// A tensor, whole as the model has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tensor {
    /// Its global name.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Where its elements are, each once, in the order of the pieces' first elements; none if it has no elements.
    pub pieces: Vec<Piece>,
}

/// A part of a tensor, contiguous in a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Piece {
    /// The file, by its place in [`Manifest::files`].
    pub file: usize,
    /// What it holds of the tensor.
    pub region: Region,
    /// Where it lies in the file's data.
    pub bytes: Bytes,
}

/// A range of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bytes {
    /// The first one.
    pub begin: u64,
    /// Behind the last one.
    pub end: u64,
}

/// A further name of a tensor, as tied weights have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Alias {
    /// The further name.
    pub name: String,
    /// The tensor's name in [`Manifest::tensors`].
    pub of: String,
}

/// Why bytes are no manifest that can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// They are not those that were written.
    #[error("it is not as it was written: {problem}")]
    Altered {
        /// How that shows.
        problem: &'static str,
    },
    /// Written by a newer version of the library.
    #[error("it has format_version {found}; this version of the library reads up to {known}")]
    NewerFormat {
        /// Its version.
        found: u32,
        /// The newest version known here.
        known: u32,
    },
    /// A value is not of the form that it should have.
    #[error("{path}: {reason}")]
    Format {
        /// Where, such as `tensors[3].shape`.
        path: String,
        /// What the parser found.
        reason: String,
    },
    /// A value cannot be true.
    #[error("{path}: {problem}")]
    Value {
        /// Where, such as `tensors[3].pieces[0].bytes`.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
}

impl Manifest {
    /// Reads and checks a manifest.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, ManifestError> {
        #[derive(Deserialize)]
        struct Versioned {
            format_version: u32,
        }
        let text = seal::open(bytes)?;
        let Versioned { format_version } = parse(&text)?;
        if format_version > FORMAT_VERSION {
            return Err(ManifestError::NewerFormat {
                found: format_version,
                known: FORMAT_VERSION,
            });
        }
        let manifest: Self = parse(&text)?;
        manifest.check()?;
        Ok(manifest)
    }

    /// It as bytes, the same for equal manifests.
    pub fn to_bytes(&self) -> Vec<u8> {
        let text = serde_json::to_string(self).expect("names and numbers are JSON");
        seal(&text)
    }

    /// Looks a tensor up by its name, or by an alias.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.place(name).map(|place| &self.tensors[place])
    }

    /// Where it is among the tensors.
    pub(crate) fn place(&self, name: &str) -> Option<usize> {
        let alias = self
            .aliases
            .binary_search_by(|one| (*one.name).cmp(name))
            .ok();
        let name = alias.map_or(name, |place| &self.aliases[place].of);
        let found = self.tensors.binary_search_by(|one| (*one.name).cmp(name));
        found.ok()
    }
}

impl Tensor {
    /// Bytes of an element. Types of less than a byte are refused where they enter.
    pub fn item_bytes(&self) -> u64 {
        item_bytes(self.dtype).expect("elements of checked tensors are whole bytes")
    }

    /// How many elements it has.
    pub fn num_elements(&self) -> u64 {
        num_elements(&self.shape).expect("elements of checked tensors can be counted")
    }

    /// Its bytes.
    pub fn num_bytes(&self) -> u64 {
        self.num_elements() * self.item_bytes()
    }
}

/// Bytes of an element, unless it has less than one.
pub fn item_bytes(dtype: Dtype) -> Option<u64> {
    let bits = dtype.bitsize() as u64;
    bits.is_multiple_of(8).then_some(bits / 8)
}

fn parse<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, ManifestError> {
    let wrong = |path: String, error: &serde_json::Error| ManifestError::Format {
        path,
        reason: error.to_string(),
    };
    let mut parser = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut parser)
        .map_err(|error| wrong(error.path().to_string(), error.inner()))?;
    parser
        .end()
        .map_err(|error| wrong(".".to_owned(), &error))?;
    Ok(value)
}
