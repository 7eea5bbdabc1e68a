//! A model's tensors whole, in the layout that `from_pretrained` of the Hugging Face libraries reads.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use safetensors::tensor::TensorInfo;
use serde_json::{Value, json};

use crate::directory::{remove_folder, sync_folder};
use crate::eager::write_file;
use crate::error::{CheckpointError, cannot};
use crate::files::{check_on_disk, disk};
use crate::manifest::Tensor;
use crate::names::WRITING;
use crate::part::header;
use crate::read::{Checkpoint, Touched};
use crate::stream::{BLOCK_BYTES, Streamed, Verified};

/// Begins the names of the model's tensors.
pub(crate) const MODEL: &str = "model/";
/// The field of a checkpoint's user content that holds the configuration of a model of `transformers`.
pub const CONFIG_KEY: &str = "huggingface_config";
/// The only file with tensors, where there is one.
pub(crate) const SINGLE: &str = "model.safetensors";
/// Says which tensor is in which file, where there are several.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// The model's configuration.
pub(crate) const CONFIG: &str = "config.json";
/// What the format calls its metadata; no tensor can have this name.
pub(crate) const METADATA: &str = "__metadata__";

/// What an export wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// The names of the files with tensors.
    pub files: Vec<String>,
    /// How many tensors.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Whether the checkpoint had a configuration to write.
    pub has_config: bool,
    /// What was read.
    pub touched: Touched,
}

/// How to export.
#[derive(Clone, Copy, Debug)]
pub struct ExportOptions {
    /// Files have no more bytes of tensors than this, except with a single tensor.
    pub max_shard_bytes: u64,
    /// Whether an earlier export is replaced.
    pub replace: bool,
}

/// Exports the tensors under `model/`, without that prefix, tied ones once, into a folder that appears complete. They are
/// streamed, verified as they are read. `progress` is told how many bytes have been written since it was told last.
///
/// # Errors
///
/// The folder exists (with `replace`: and holds something else than an export), a file is not as it was written, or the
/// file system refuses. Nothing is left of the new files then.
pub fn export_full(
    checkpoint: &Checkpoint,
    out: &Path,
    options: ExportOptions,
    progress: &mut dyn FnMut(u64),
) -> Result<Exported, CheckpointError> {
    let tensors = model_tensors(checkpoint)?;
    let place = Place::new(out, options.replace)?;
    remove_folder(&place.beside)?; // what an ended run left
    let new = disk::missing(&place.parent);
    let made = disk::make_folder(&place.beside).map_err(cannot("create", &place.beside));
    let exported = made
        .and_then(|()| {
            write(
                checkpoint,
                &tensors,
                &place.beside,
                options.max_shard_bytes,
                progress,
            )
        })
        .and_then(|exported| place.give_name().map(|()| exported));
    if exported.is_err() {
        remove_folder(&place.beside).ok(); // the error that is told is the one that came first
        disk::remove_empty(&new);
    }
    exported
}

fn model_tensors(checkpoint: &Checkpoint) -> Result<Vec<(&str, &Tensor)>, CheckpointError> {
    let all = checkpoint.manifest().tensors.iter();
    let named = all.filter_map(|tensor| Some((tensor.name.strip_prefix(MODEL)?, tensor)));
    let tensors: Vec<_> = named.collect();
    if tensors.is_empty() {
        return Err(CheckpointError::NoModel {
            folder: checkpoint.folder().to_owned(),
        });
    }
    match tensors.iter().find(|(name, _)| *name == METADATA) {
        Some((_, tensor)) => Err(CheckpointError::ReservedName {
            name: tensor.name.clone(),
        }),
        None => Ok(tensors),
    }
}

fn write(
    checkpoint: &Checkpoint,
    tensors: &[(&str, &Tensor)],
    folder: &Path,
    max_bytes: u64,
    progress: &mut dyn FnMut(u64),
) -> Result<Exported, CheckpointError> {
    let shards = shards(tensors, max_bytes);
    let count = shards.len();
    let name = |number: usize| match count {
        1 => SINGLE.to_owned(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
    };
    let mut reader = Verified::new(checkpoint);
    let mut places = BTreeMap::new();
    for (number, shard) in shards.iter().enumerate() {
        write_shard(&mut reader, shard, &folder.join(name(number)), progress)?;
        places.extend(shard.iter().map(|(tensor, _)| (*tensor, name(number))));
    }
    let bytes = tensors.iter().map(|(_, tensor)| tensor.num_bytes()).sum();
    if count > 1 {
        let index = json!({"metadata": {"total_size": bytes}, "weight_map": places});
        write_json(&folder.join(INDEX), &index)?;
    }
    let config = checkpoint.manifest().user_content.get(CONFIG_KEY);
    let config = config.filter(|config| config.is_object());
    if let Some(config) = config {
        write_json(&folder.join(CONFIG), config)?;
    }
    sync_folder(folder)?;
    Ok(Exported {
        files: (0..count).map(name).collect(),
        tensors: tensors.len(),
        bytes,
        has_config: config.is_some(),
        touched: reader.touched(),
    })
}

/// Which tensors go into which file, in the order of names: as `transformers` does it, a file is full where the next tensor
/// would make it larger than it may be.
fn shards<'a>(
    tensors: &[(&'a str, &'a Tensor)],
    max_bytes: u64,
) -> Vec<Vec<(&'a str, &'a Tensor)>> {
    let mut shards = vec![Vec::new()];
    let mut filled: u64 = 0;
    for &(name, tensor) in tensors {
        let bytes = tensor.num_bytes();
        let last = shards.last().expect("there is one");
        if !last.is_empty() && filled.saturating_add(bytes) > max_bytes {
            shards.push(Vec::new());
            filled = 0;
        }
        filled = filled.saturating_add(bytes);
        let last = shards.last_mut().expect("there is one");
        last.push((name, tensor));
    }
    shards
}

fn write_shard(
    reader: &mut Verified<'_>,
    shard: &[(&str, &Tensor)],
    path: &Path,
    progress: &mut dyn FnMut(u64),
) -> Result<(), CheckpointError> {
    let mut order: Vec<_> = shard.iter().collect();
    order.sort_by_key(|(name, tensor)| (Reverse(tensor.item_bytes()), *name));
    let mut begin = 0;
    let infos = order.iter().map(|(name, tensor)| {
        let end = begin + tensor.num_bytes() as usize;
        let info = TensorInfo {
            dtype: tensor.dtype,
            shape: tensor.shape.iter().map(|side| *side as usize).collect(),
            data_offsets: (begin, end),
        };
        begin = end;
        ((*name).to_owned(), info)
    });
    let header = header(infos.collect());
    let file = File::create_new(path).map_err(cannot("create", path))?;
    let mut file = Streamed::new(file, path, (header.len() + begin) as u64);
    file.write(&header)?;
    let mut block = Vec::new();
    for (_, tensor) in order {
        let (item, mut first) = (tensor.item_bytes(), 0);
        while first < tensor.num_elements() {
            let count = (tensor.num_elements() - first).min(BLOCK_BYTES / item);
            block.resize((count * item) as usize, 0);
            reader.read_elements(tensor, first, &mut block)?;
            file.write(&block)?;
            progress(count * item);
            first += count;
        }
    }
    file.finish()
}

fn write_json(path: &Path, value: &Value) -> Result<(), CheckpointError> {
    let text = serde_json::to_string_pretty(value).expect("it was JSON") + "\n";
    write_file(path, text.as_bytes())
}

/// Where an export goes.
struct Place<'a> {
    out: &'a Path,
    parent: PathBuf,
    /// Where it is while it is written.
    beside: PathBuf,
    exists: bool,
}

impl<'a> Place<'a> {
    fn new(out: &'a Path, replace: bool) -> Result<Self, CheckpointError> {
        check_on_disk(out)?;
        let Some(name) = out.file_name() else {
            return Err(CheckpointError::NotReplaceable {
                path: out.to_owned(),
                found: "no name of a new folder".to_owned(),
            });
        };
        let parent = match out.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        let beside = parent.join(format!(".{}{WRITING}", name.to_string_lossy()));
        let exists = match out.symlink_metadata() {
            Ok(_) if !replace => {
                return Err(CheckpointError::Exists {
                    path: out.to_owned(),
                });
            }
            Ok(_) => {
                check_replaceable(out)?;
                true
            }
            Err(_) => false,
        };
        Ok(Self {
            out,
            parent: parent.to_owned(),
            beside,
            exists,
        })
    }

    /// The one step in which the export is there. One from before is exchanged with it, and then removed.
    fn give_name(&self) -> Result<(), CheckpointError> {
        if self.exists {
            check_replaceable(self.out)?; // others may have put something there meanwhile
            renameat_with(CWD, &self.beside, CWD, self.out, RenameFlags::EXCHANGE).map_err(
                |error| CheckpointError::NoExchange {
                    path: self.out.to_owned(),
                    source: error.into(),
                },
            )?;
            sync_folder(&self.parent)?;
            return remove_folder(&self.beside);
        }
        renameat_with(CWD, &self.beside, CWD, self.out, RenameFlags::NOREPLACE).map_err(
            |error| {
                if error == rustix::io::Errno::EXIST {
                    let path = self.out.to_owned();
                    CheckpointError::Exists { path }
                } else {
                    cannot("name", self.out)(error.into())
                }
            },
        )?;
        sync_folder(&self.parent)
    }
}

/// Refuses to remove a folder that holds anything that no export writes.
fn check_replaceable(out: &Path) -> Result<(), CheckpointError> {
    let refused = |found: String| {
        Err(CheckpointError::NotReplaceable {
            path: out.to_owned(),
            found,
        })
    };
    let is_folder = out
        .symlink_metadata()
        .map_err(cannot("look at", out))?
        .is_dir();
    if !is_folder {
        return refused("something else than a folder".to_owned());
    }
    for entry in fs::read_dir(out).map_err(cannot("list", out))? {
        let entry = entry.map_err(cannot("list", out))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_file = entry
            .file_type()
            .map_err(cannot("look at", &entry.path()))?
            .is_file();
        if !is_file || !is_of_an_export(&name) {
            return refused(name);
        }
    }
    Ok(())
}

fn is_of_an_export(name: &str) -> bool {
    let shard = name
        .strip_prefix("model-")
        .and_then(|rest| rest.strip_suffix(".safetensors"));
    let numbers = shard.and_then(|numbers| numbers.split_once("-of-"));
    let is_number = |text: &str| text.len() >= 5 && text.bytes().all(|one| one.is_ascii_digit());
    let is_shard = numbers.is_some_and(|(one, all)| is_number(one) && is_number(all));
    [SINGLE, INDEX, CONFIG].contains(&name) || is_shard
}

#[cfg(test)]
mod tests {
    use super::is_of_an_export;

    #[test]
    fn only_what_an_export_writes_is_replaced() {
        for name in [
            "model.safetensors",
            "config.json",
            "model-00001-of-00012.safetensors",
        ] {
            assert!(is_of_an_export(name), "{name}");
        }
        for name in [
            "tokenizer.json",
            "model-1-of-2.safetensors",
            "model-0000x-of-00012.safetensors",
        ] {
            assert!(!is_of_an_export(name), "{name}");
        }
    }
}
