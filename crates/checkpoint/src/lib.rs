//! Sharded checkpoints: every rank writes its part, and any division of the same tensors reads them.
//!
//! A checkpoint is a folder of safetensors files and a [`Manifest`] that says which file holds what of which tensor. What
//! decides is pure: the manifest and its checks, the [`plan`] of reads, [`differences`], [`superseded`]. [`write_part`],
//! [`commit`], [`Directory`] and [`Checkpoint`] do the I/O, on a disk or in an object store.
//!
//! ```
//! use serde_json::json;
//! use shardwright_checkpoint::{
//!     Checkpoint, Degrees, Description, Directory, Dtype, PieceView, Region, Wanted, commit, write_part,
//! };
//!
//! # let place = std::env::temp_dir().join(format!("shardwright-doc-{}", std::process::id()));
//! let directory = Directory::new(&place)?;
//! let half = |offset: u64, bytes: &'static [u8]| PieceView {
//!     name: "weight",
//!     dtype: Dtype::U8,
//!     shape: &[2, 2],
//!     region: Region::boxed(vec![offset, 0], vec![1, 2]),
//!     bytes,
//! };
//! let parts = vec![
//!     write_part(&directory, "step1", "part-0.safetensors", &[half(0, &[1, 2])])?,
//!     write_part(&directory, "step1", "part-1.safetensors", &[half(1, &[3, 4])])?,
//! ];
//! let description = Description {
//!     library_version: "0.1.0".to_owned(),
//!     step: Some(1),
//!     degrees: Degrees::ONE,
//!     partition: Vec::new(),
//!     aliases: Vec::new(),
//!     user_content: json!({"epoch": 3}),
//! };
//! commit(&directory, "step1", description, parts, None)?;
//!
//! let checkpoint = Checkpoint::open(&directory, None)?;
//! let mut column = [0; 2];
//! let region = Region::boxed(vec![0, 1], vec![2, 1]);
//! checkpoint.read(vec![Wanted { name: "weight", region, into: &mut column }])?;
//! assert_eq!(column, [2, 4]);
//! # std::fs::remove_dir_all(place).unwrap();
//! # Ok::<(), shardwright_checkpoint::CheckpointError>(())
//! ```

mod assemble;
mod background;
mod chunks;
mod compare;
mod damage;
mod differences;
mod directory;
mod eager;
mod error;
mod files;
mod foreign;
mod full;
mod hash;
mod import;
mod incoming;
mod leftovers;
mod lock;
mod manifest;
mod names;
mod part;
mod plan;
mod read;
mod recut;
mod region;
mod retention;
mod rewrite;
mod stream;
mod stretches;
mod tiling;
mod verify;
mod write;

#[cfg(test)]
mod tests;

pub use assemble::{AssembleError, Description, Said, assemble};
pub use background::{Background, PartCopy, PartInBackground};
pub use compare::{Unequal, unequal};
pub use damage::Damage;
pub use differences::{Difference, TensorKind, differences};
pub use directory::{Directory, Entry, EntryState, checked_tag};
pub use error::CheckpointError;
pub use files::StoreError;
pub use foreign::{ForeignError, check_header};
pub use full::{CONFIG_KEY, ExportOptions, Exported, export_full};
pub use hash::{CHUNK_BYTES, ChunkHash, hash_chunks};
pub use import::ForeignModel;
pub use incoming::PartWriter;
pub use leftovers::remove_unfinished;
pub use lock::DirectoryLock;
pub use manifest::{
    Alias, Bytes, Degrees, FORMAT_VERSION, Manifest, ManifestError, PartFile, Piece, Placement,
    Tensor, item_bytes, seal,
};
pub use names::{NameError, check_tag};
pub use part::{PartReport, PieceError, PieceSpec, PieceView};
pub use plan::{PlanError, Read, plan};
pub use read::{Checkpoint, Touched, Wanted};
pub use region::{Region, RegionError, Run, num_elements};
pub use retention::{Complete, superseded};
pub use rewrite::{Resharded, reshard};
pub use safetensors::Dtype;
pub use write::{Committed, abandon, commit, write_part};
