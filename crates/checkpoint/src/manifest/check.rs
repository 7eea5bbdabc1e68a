//! What has to be true of a manifest.

use std::fmt::Display;

use super::{Manifest, ManifestError, PartFile, Piece, Tensor, item_bytes};
use crate::hash::num_chunks;
use crate::names::{check_file_name, check_tag};
use crate::part::MAX_HEADER_BYTES;
use crate::region::{Boxed, MAX_DIMENSIONS, num_elements};
use crate::tiling::tile;

/// Of more pieces it is only said that some hold the same: to find two takes long.
const MOST_COMPARED: usize = 1000;

fn wrong<T>(path: impl Display, problem: impl Display) -> Result<T, ManifestError> {
    Err(ManifestError::Value {
        path: path.to_string(),
        problem: problem.to_string(),
    })
}

impl Manifest {
    /// Refuses a manifest that cannot be true.
    pub fn check(&self) -> Result<(), ManifestError> {
        if self.format_version != super::FORMAT_VERSION {
            return wrong("format_version", "no version has this number");
        }
        if let Err(problem) = check_tag(&self.tag) {
            return wrong("tag", problem);
        }
        self.check_order()?;
        self.check_partition()?;
        for (number, file) in self.files.iter().enumerate() {
            check_file(file, number)?;
        }
        for (number, tensor) in self.tensors.iter().enumerate() {
            self.check_tensor(tensor, number)?;
        }
        self.check_data()?;
        self.check_aliases()
    }

    fn check_order(&self) -> Result<(), ManifestError> {
        let modules = self.partition.iter().map(|one| &*one.module);
        ascending("partition", "module", modules)?;
        ascending("files", "name", self.files.iter().map(|one| &*one.name))?;
        ascending("tensors", "name", self.tensors.iter().map(|one| &*one.name))?;
        ascending("aliases", "name", self.aliases.iter().map(|one| &*one.name))
    }

    fn check_partition(&self) -> Result<(), ManifestError> {
        let degree = self.degrees.pipeline.get();
        for (number, place) in self.partition.iter().enumerate() {
            let rank = place.pp_rank;
            if rank >= degree {
                let problem = format!("the pipeline has {degree} ranks; there is no rank {rank}");
                return wrong(format_args!("partition[{number}].pp_rank"), problem);
            }
        }
        Ok(())
    }

    fn check_tensor(&self, tensor: &Tensor, number: usize) -> Result<(), ManifestError> {
        let path = format!("tensors[{number}]");
        let Some(item) = item_bytes(tensor.dtype) else {
            return wrong(format_args!("{path}.dtype"), "it has less than a byte");
        };
        if tensor.shape.len() > MAX_DIMENSIONS {
            let problem = format!("more than {MAX_DIMENSIONS} dimensions");
            return wrong(format_args!("{path}.shape"), problem);
        }
        let elements = num_elements(&tensor.shape);
        let Some(elements) = elements.filter(|all| all.checked_mul(item).is_some()) else {
            return wrong(format_args!("{path}.shape"), "its bytes are beyond 64 bits");
        };
        let mut found: u64 = 0;
        let mut boxes = Vec::with_capacity(tensor.pieces.len());
        for (place, piece) in tensor.pieces.iter().enumerate() {
            let path = format!("{path}.pieces[{place}]");
            let count = match piece.region.check(&tensor.shape) {
                Ok(0) => return wrong(format_args!("{path}.region"), "it is empty"),
                Ok(count) => count,
                Err(error) => return wrong(format_args!("{path}.region"), error),
            };
            self.check_bytes(piece, count * item, &path)?;
            found = found.saturating_add(count);
            boxes.extend(piece.region.boxes());
        }
        check_pieces_order(tensor, &path)?;
        if tile(&tensor.shape, &boxes) {
            return Ok(());
        }
        if tensor.pieces.len() <= MOST_COMPARED {
            check_disjoint(tensor, &path)?;
        }
        let problem = if found == elements {
            "some hold the same elements".to_owned()
        } else {
            format!("they hold {found} of its {elements} elements")
        };
        wrong(format_args!("{path}.pieces"), problem)
    }

    fn check_bytes(&self, piece: &Piece, expected: u64, path: &str) -> Result<(), ManifestError> {
        let Some(file) = self.files.get(piece.file) else {
            let problem = format!("there are {} files", self.files.len());
            return wrong(format_args!("{path}.file"), problem);
        };
        let (begin, end) = (piece.bytes.begin, piece.bytes.end);
        let data = file.bytes - file.data_begin;
        if end > data {
            let problem = format!("it ends at {end} and the data of the file at {data}");
            return wrong(format_args!("{path}.bytes"), problem);
        }
        if end.checked_sub(begin) != Some(expected) {
            let problem = format!("{begin} to {end} are not the {expected} bytes of the region");
            return wrong(format_args!("{path}.bytes"), problem);
        }
        Ok(())
    }

    /// Each byte of the files' data belongs to one piece.
    fn check_data(&self) -> Result<(), ManifestError> {
        let mut ranges = Vec::new();
        for (number, tensor) in self.tensors.iter().enumerate() {
            let pieces = tensor.pieces.iter().enumerate();
            ranges.extend(pieces.map(|(place, piece)| (piece.file, piece.bytes, number, place)));
        }
        ranges.sort_unstable();
        let mut ends = vec![0; self.files.len()];
        for (file, bytes, tensor, piece) in ranges {
            let end = &mut ends[file];
            if bytes.begin != *end {
                let problem = format!("the piece before it in the file ends at {end}");
                let path = format_args!("tensors[{tensor}].pieces[{piece}].bytes.begin");
                return wrong(path, problem);
            }
            *end = bytes.end;
        }
        for (number, (file, end)) in self.files.iter().zip(ends).enumerate() {
            let data = file.bytes - file.data_begin;
            if end != data {
                let problem = format!("it has {data} bytes of data, and pieces for {end} of them");
                return wrong(format_args!("files[{number}].bytes"), problem);
            }
        }
        Ok(())
    }

    fn check_aliases(&self) -> Result<(), ManifestError> {
        let names = |name: &str| self.tensors.binary_search_by(|one| (*one.name).cmp(name));
        let is_tensor = |name: &str| names(name).is_ok();
        for (number, alias) in self.aliases.iter().enumerate() {
            if !is_tensor(&alias.of) {
                let problem = format!("there is no tensor {:?}", alias.of);
                return wrong(format_args!("aliases[{number}].of"), problem);
            }
            if is_tensor(&alias.name) {
                let problem = "it is the name of another tensor";
                return wrong(format_args!("aliases[{number}].name"), problem);
            }
        }
        Ok(())
    }
}

fn ascending<'a>(
    list: &str,
    field: &str,
    names: impl Iterator<Item = &'a str>,
) -> Result<(), ManifestError> {
    let mut before = None;
    for (number, name) in names.enumerate() {
        if before.is_some_and(|before| before >= name) {
            let problem = if before == Some(name) {
                format!("{name:?} is there twice")
            } else {
                format!("{name:?} is not in the order of names")
            };
            return wrong(format_args!("{list}[{number}].{field}"), problem);
        }
        before = Some(name);
    }
    Ok(())
}

fn check_file(file: &PartFile, number: usize) -> Result<(), ManifestError> {
    if let Err(problem) = check_file_name(&file.name) {
        return wrong(format_args!("files[{number}].name"), problem);
    }
    if file.data_begin > file.bytes {
        let problem = format!("the file ends at {}", file.bytes);
        return wrong(format_args!("files[{number}].data_begin"), problem);
    }
    if file.data_begin > MAX_HEADER_BYTES {
        let problem = format!("headers have {MAX_HEADER_BYTES} bytes at most");
        return wrong(format_args!("files[{number}].data_begin"), problem);
    }
    let (found, expected) = (file.chunks.len() as u64, num_chunks(file.bytes));
    if found != expected {
        let problem = format!("{found} hashes; the file has {expected} chunks");
        return wrong(format_args!("files[{number}].chunks"), problem);
    }
    Ok(())
}

fn check_pieces_order(tensor: &Tensor, path: &str) -> Result<(), ManifestError> {
    let mut last = None;
    for (place, piece) in tensor.pieces.iter().enumerate() {
        let hull = piece.region.hull(&tensor.shape);
        let (first, _) = hull.expect("empty pieces were refused");
        if last.is_some_and(|last| last > first) {
            let problem = "it begins before the piece in front of it";
            return wrong(format_args!("{path}.pieces[{place}].region"), problem);
        }
        last = Some(first);
    }
    Ok(())
}

/// Names two of few pieces that hold the same.
fn check_disjoint(tensor: &Tensor, path: &str) -> Result<(), ManifestError> {
    let mut open: Vec<(u64, usize, Vec<Boxed>)> = Vec::new();
    for (place, piece) in tensor.pieces.iter().enumerate() {
        let hull = piece.region.hull(&tensor.shape);
        let (first, end) = hull.expect("empty pieces were refused");
        open.retain(|(end, ..)| *end >= first);
        let boxes = piece.region.boxes();
        for (_, other, held) in &open {
            let meets = |one: &Boxed| held.iter().any(|held| one.intersection(held).is_some());
            if boxes.iter().any(meets) {
                let problem = format!("pieces[{other}] holds some of it too");
                return wrong(format_args!("{path}.pieces[{place}].region"), problem);
            }
        }
        open.push((end, place, boxes));
    }
    Ok(())
}
