//! A checkpoint out of a model in the layout of the Hugging Face libraries.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::ErrorKind;
use std::num::NonZeroU16;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::assemble::Description;
use crate::directory::Directory;
use crate::error::{CheckpointError, cannot};
use crate::files::{check_place, disk};
use crate::foreign::{
    ForeignError, ForeignTensor, MAX_HEADER_BYTES, data_bytes, read_header, read_index,
};
use crate::full::{CONFIG, CONFIG_KEY, INDEX, MODEL, SINGLE};
use crate::manifest::{Degrees, Manifest, Piece, Tensor};
use crate::names::check_file_name;
use crate::part::SIZE_BYTES;
use crate::region::Region;
use crate::rewrite::Target;
use crate::stream::Source;

/// What every checkpoint of `torch.distributed.checkpoint` has.
const TORCH_METADATA: &str = ".metadata";

/// A model of others, whose headers have been read and checked.
#[derive(Debug)]
pub struct ForeignModel {
    files: Vec<ForeignFile>,
    tensors: Vec<Tensor>,
    config: Option<Value>,
}

#[derive(Debug)]
struct ForeignFile {
    path: PathBuf,
    file: File,
    data_begin: u64,
}

impl ForeignModel {
    /// Opens a folder with `model.safetensors`, or with the files of `model.safetensors.index.json`.
    ///
    /// # Errors
    ///
    /// There are no such files, or what one says of itself cannot be true.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        check_place(folder)?;
        let (names, index) = file_names(folder)?;
        let (mut files, mut tensors) = (Vec::new(), Vec::new());
        for (number, name) in names.iter().enumerate() {
            let (file, held) = open_file(folder.join(name))?;
            if let Some(index) = &index {
                check_index(&file.path, name, &held, index)?;
            }
            tensors.extend(held.into_iter().map(|one| tensor(one, number)));
            files.push(file);
        }
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        let config = read_if_there(&folder.join(CONFIG))?;
        let config = config.map(|(path, text)| {
            let parsed = serde_json::from_slice::<Value>(&text);
            parsed.map_err(|error| foreign(&path, ForeignError::Form(error.to_string())))
        });
        Ok(Self {
            files,
            tensors,
            config: config.transpose()?,
        })
    }

    /// How many files it has.
    pub fn num_files(&self) -> usize {
        self.files.len()
    }

    /// The bytes of its tensors.
    pub fn num_bytes(&self) -> u64 {
        self.tensors.iter().map(Tensor::num_bytes).sum()
    }

    /// Writes it as a checkpoint, with its tensors under `model/` in `parts` files of equal sizes, and its configuration as
    /// user content. `progress` is told how many bytes have been written since it was told last. A checkpoint of the tag
    /// that is there already is replaced only with `replace`.
    ///
    /// # Errors
    ///
    /// The files have changed since they were opened, or the file system refuses. What was written is removed then.
    pub fn import(
        &mut self,
        into: &Directory,
        tag: &str,
        parts: NonZeroU16,
        replace: bool,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Manifest, CheckpointError> {
        let config = self.config.iter();
        let content = config.map(|config| (CONFIG_KEY.to_owned(), config.clone()));
        let description = Description {
            library_version: env!("CARGO_PKG_VERSION").to_owned(),
            step: None,
            degrees: Degrees::ONE,
            partition: Vec::new(),
            aliases: Vec::new(),
            user_content: json!(content.collect::<serde_json::Map<_, _>>()),
        };
        let target = Target {
            directory: into,
            tag,
            parts,
            replace,
        };
        let Self { files, tensors, .. } = self;
        target.write(tensors, description, &mut Files(files), progress)
    }
}

/// Reads files that have no hashes to verify them by.
struct Files<'a>(&'a [ForeignFile]);

impl Source for Files<'_> {
    fn read(&mut self, file: usize, at: u64, into: &mut [u8]) -> Result<(), CheckpointError> {
        let ForeignFile {
            path,
            file,
            data_begin,
        } = &self.0[file];
        file.read_exact_at(into, data_begin + at)
            .map_err(cannot("read", path))
    }
}

fn foreign(path: &Path, source: ForeignError) -> CheckpointError {
    CheckpointError::Foreign {
        path: path.to_owned(),
        source: Box::new(source),
    }
}

fn read_if_there(path: &Path) -> Result<Option<(PathBuf, Vec<u8>)>, CheckpointError> {
    match disk::open_linked(path).and_then(|file| disk::read(&file, MAX_HEADER_BYTES)) {
        Ok(text) => Ok(Some((path.to_owned(), text))),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(cannot("read", path)(error)),
    }
}

/// Which tensor is in which file.
type Index = BTreeMap<String, String>;

/// The files with tensors, and the index if there are several.
fn file_names(folder: &Path) -> Result<(Vec<String>, Option<Index>), CheckpointError> {
    if folder.join(SINGLE).exists() {
        return Ok((vec![SINGLE.to_owned()], None));
    }
    let Some((path, text)) = read_if_there(&folder.join(INDEX))? else {
        if folder.join(TORCH_METADATA).exists() {
            return Err(CheckpointError::TorchDistributed {
                folder: folder.to_owned(),
            });
        }
        return Err(CheckpointError::NoForeignModel {
            folder: folder.to_owned(),
        });
    };
    let index = read_index(&text).map_err(|error| foreign(&path, error))?;
    let names: BTreeSet<&String> = index.values().collect();
    for name in &names {
        check_file_name(name).map_err(|source| CheckpointError::Name {
            what: "file of a model",
            name: (*name).clone(),
            source,
        })?;
    }
    Ok((names.into_iter().cloned().collect(), Some(index)))
}

/// A file with its tensors.
fn open_file(path: PathBuf) -> Result<(ForeignFile, Vec<ForeignTensor>), CheckpointError> {
    let file = disk::open_linked(&path).map_err(cannot("open", &path))?;
    let found = file.metadata().map_err(cannot("look at", &path))?;
    if !found.is_file() {
        let problem = ForeignError::Form("it is no ordinary file".to_owned());
        return Err(foreign(&path, problem));
    }
    let short = |expected| {
        let found = found.len();
        foreign(&path, ForeignError::Short { found, expected })
    };
    let before = SIZE_BYTES as u64;
    if found.len() < before {
        return Err(short(before));
    }
    let mut size = [0; SIZE_BYTES];
    file.read_exact_at(&mut size, 0)
        .map_err(cannot("read", &path))?;
    let bytes = u64::from_le_bytes(size);
    if bytes > MAX_HEADER_BYTES {
        return Err(foreign(&path, ForeignError::Header { bytes }));
    }
    let data_begin = before + bytes;
    let Some(data) = found.len().checked_sub(data_begin) else {
        return Err(short(data_begin));
    };
    let mut text = vec![0; bytes as usize];
    file.read_exact_at(&mut text, before)
        .map_err(cannot("read", &path))?;
    let tensors = read_header(&text).map_err(|error| foreign(&path, error))?;
    let end = data_bytes(&tensors);
    if end != data {
        return Err(foreign(&path, ForeignError::Rest { end, found: data }));
    }
    let file = ForeignFile {
        path,
        file,
        data_begin,
    };
    Ok((file, tensors))
}

/// A file holds those tensors that the index says, and no others.
fn check_index(
    path: &Path,
    name: &str,
    held: &[ForeignTensor],
    index: &Index,
) -> Result<(), CheckpointError> {
    let wrong = |tensor: &str, problem| {
        let tensor = tensor.to_owned();
        Err(foreign(path, ForeignError::Index { tensor, problem }))
    };
    let here: BTreeSet<&str> = held.iter().map(|tensor| &*tensor.name).collect();
    for tensor in &here {
        if index.get(*tensor).is_none_or(|file| file != name) {
            return wrong(tensor, "in it, but not by the index");
        }
    }
    let said = index.iter().filter(|(_, file)| *file == name);
    for (tensor, _) in said {
        if !here.contains(&**tensor) {
            return wrong(tensor, "in it by the index, but not there");
        }
    }
    Ok(())
}

fn tensor(one: ForeignTensor, file: usize) -> Tensor {
    let region = Region::whole(&one.shape);
    let bytes = one.bytes;
    let piece = (bytes.end > bytes.begin).then_some(Piece {
        file,
        region,
        bytes,
    });
    Tensor {
        name: format!("{MODEL}{}", one.name),
        dtype: one.dtype,
        shape: one.shape,
        pieces: piece.into_iter().collect(),
    }
}
