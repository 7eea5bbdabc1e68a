//! The file that a rank writes: how it is laid out, and what it tells of it. Pure.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::{Deserialize, Serialize};

use crate::manifest::{Bytes, Manifest, PartFile, Piece, Tensor, item_bytes};
use crate::region::{Region, RegionError, num_elements};

/// What stands before the header in a file of the format: its size.
pub(crate) const SIZE_BYTES: usize = size_of::<u64>();
/// How many bytes come before a file's data at most; writing refuses more, too.
pub(crate) const MAX_HEADER_BYTES: u64 = 1 << 28;
/// Headers are filled up to this, so that data are aligned.
const ALIGNMENT: usize = 8;

/// A part of a tensor that a rank holds, to be written.
#[derive(Clone, Debug)]
pub struct PieceView<'a> {
    /// The tensor's global name.
    pub name: &'a str,
    /// The type of its elements.
    pub dtype: Dtype,
    /// The shape of the whole tensor.
    pub shape: &'a [u64],
    /// What this is of it.
    pub region: Region,
    /// The elements, contiguous.
    pub bytes: &'a [u8],
}

impl<'a> PieceView<'a> {
    /// It without its elements.
    pub(crate) fn spec(&self) -> PieceSpec<'a> {
        PieceSpec {
            name: self.name,
            dtype: self.dtype,
            shape: self.shape,
            region: self.region.clone(),
        }
    }
}

/// A part of a tensor without its elements.
#[derive(Clone, Debug)]
pub struct PieceSpec<'a> {
    /// The tensor's global name.
    pub name: &'a str,
    /// The type of its elements.
    pub dtype: Dtype,
    /// The shape of the whole tensor.
    pub shape: &'a [u64],
    /// What this is of it.
    pub region: Region,
}

/// What a rank has written, for the rank that writes the manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartReport {
    /// The file.
    pub file: PartFile,
    /// Of each tensor that it has a part of, that part; the pieces' files are 0.
    pub tensors: Vec<Tensor>,
}

/// Why a piece cannot be written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PieceError {
    /// It is no region of the tensor.
    #[error("tensor {tensor:?}: {source}")]
    Region {
        /// The tensor's name.
        tensor: String,
        /// What is wrong.
        source: RegionError,
    },
    /// Elements of less than a byte.
    #[error("tensor {tensor:?}: elements of type {dtype} have less than a byte each")]
    Dtype {
        /// The tensor's name.
        tensor: String,
        /// Its type.
        dtype: Dtype,
    },
    /// The memory has another size than the region.
    #[error("tensor {tensor:?}: {given} bytes were given for {region}, which has {expected}")]
    Size {
        /// The tensor's name.
        tensor: String,
        /// What the memory is to be.
        region: Region,
        /// How many bytes it has.
        given: u64,
        /// How many bytes the region has.
        expected: u64,
    },
    /// Two pieces that do not agree.
    #[error("tensor {tensor:?} was given with different shapes or types")]
    Disagreement {
        /// The tensor's name.
        tensor: String,
    },
    /// The name of a piece in the file is taken by another tensor.
    #[error("tensor {tensor:?}: another tensor has the name {name:?} of one of its pieces")]
    Name {
        /// The tensor's name.
        tensor: String,
        /// The name.
        name: String,
    },
}

/// A file as it will be.
#[derive(Debug)]
pub(crate) struct PartLayout {
    /// What comes before the data.
    pub(crate) header: Vec<u8>,
    /// The places of the given pieces in the order of their data.
    pub(crate) order: Vec<usize>,
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) bytes: u64,
}

/// Lays out a file of pieces that are in memory, each with as many bytes as its region has.
pub(crate) fn lay_out(pieces: &[PieceView<'_>]) -> Result<PartLayout, PieceError> {
    let specs: Vec<PieceSpec<'_>> = pieces.iter().map(PieceView::spec).collect();
    for (piece, spec) in pieces.iter().zip(&specs) {
        let (given, expected) = (piece.bytes.len() as u64, checked_bytes(spec)?);
        if given != expected {
            return Err(PieceError::Size {
                tensor: piece.name.to_owned(),
                region: piece.region.clone(),
                given,
                expected,
            });
        }
    }
    lay_out_specs(&specs)
}

/// Lays out a file: elements with the strictest alignment first, as the format asks, else in the given order.
pub(crate) fn lay_out_specs(pieces: &[PieceSpec<'_>]) -> Result<PartLayout, PieceError> {
    let mut sizes = Vec::with_capacity(pieces.len());
    for piece in pieces {
        sizes.push(checked_bytes(piece)?);
    }
    let mut order: Vec<usize> = (0..pieces.len()).filter(|one| sizes[*one] > 0).collect();
    order.sort_by_key(|one| Reverse(item_bytes(pieces[*one].dtype)));
    let mut tensors: BTreeMap<&str, Tensor> = BTreeMap::new();
    for piece in pieces {
        let tensor = tensors.entry(piece.name).or_insert_with(|| Tensor {
            name: piece.name.to_owned(),
            dtype: piece.dtype,
            shape: piece.shape.to_vec(),
            pieces: Vec::new(),
        });
        if tensor.dtype != piece.dtype || tensor.shape != piece.shape {
            return Err(PieceError::Disagreement {
                tensor: piece.name.to_owned(),
            });
        }
    }
    let mut infos = Vec::with_capacity(order.len());
    let mut used = BTreeSet::new();
    let mut begin = 0;
    for &place in &order {
        let piece = &pieces[place];
        let tensor = tensors.get_mut(piece.name).expect("it was entered above");
        let end = begin + sizes[place];
        tensor.pieces.push(Piece {
            file: 0,
            region: piece.region.clone(),
            bytes: Bytes { begin, end },
        });
        let name = match tensor.pieces.len() {
            1 => piece.name.to_owned(),
            number => format!("{}#{number}", piece.name),
        };
        if !used.insert(name.clone()) {
            return Err(PieceError::Name {
                tensor: piece.name.to_owned(),
                name,
            });
        }
        let info = TensorInfo {
            dtype: piece.dtype,
            shape: sides(&piece.region),
            data_offsets: (begin as usize, end as usize),
        };
        infos.push((name, info));
        begin = end;
    }
    let header = header(infos);
    Ok(PartLayout {
        bytes: header.len() as u64 + begin,
        header,
        order,
        tensors: tensors.into_values().collect(),
    })
}

/// The bytes of a piece that makes sense.
pub(crate) fn checked_bytes(piece: &PieceSpec<'_>) -> Result<u64, PieceError> {
    let tensor = || piece.name.to_owned();
    let Some(item) = item_bytes(piece.dtype) else {
        return Err(PieceError::Dtype {
            tensor: tensor(),
            dtype: piece.dtype,
        });
    };
    let refused = |source| PieceError::Region {
        tensor: tensor(),
        source,
    };
    let count = piece.region.check(piece.shape).map_err(refused)?;
    let all = num_elements(piece.shape).and_then(|all| all.checked_mul(item));
    if all.is_none() {
        return Err(refused(RegionError::TooLarge));
    }
    Ok(count * item)
}

fn sides(region: &Region) -> Vec<usize> {
    let shape = region.shape().into_iter();
    shape.map(|side| side as usize).collect()
}

/// All that comes before the data of a file with these tensors, in the order of their data.
pub(crate) fn header(infos: Vec<(String, TensorInfo)>) -> Vec<u8> {
    // Other readers of the format want to know for which library the tensors are.
    let about = [("format".to_owned(), "pt".to_owned())]
        .into_iter()
        .collect();
    let metadata = Metadata::new(Some(about), infos).expect("offsets follow one another");
    let mut text = serde_json::to_vec(&metadata).expect("names and numbers are JSON");
    text.resize(text.len().next_multiple_of(ALIGNMENT), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    header
}

/// What a header says of a piece: where it lies, its type and its shape.
pub(crate) type Described = ((usize, usize), Dtype, Vec<usize>);

/// What the headers of all files have to say.
pub(crate) fn headers(manifest: &Manifest) -> Vec<Vec<Described>> {
    let mut headers = vec![Vec::new(); manifest.files.len()];
    for tensor in &manifest.tensors {
        for piece in &tensor.pieces {
            let offsets = (piece.bytes.begin as usize, piece.bytes.end as usize);
            headers[piece.file].push((offsets, tensor.dtype, sides(&piece.region)));
        }
    }
    headers
}

/// What is wrong with a file's header, all that comes before its data; `None` if it says what is expected.
pub(crate) fn header_problem(header: &[u8], mut expected: Vec<Described>) -> Option<String> {
    let Some((size, text)) = header.split_first_chunk::<SIZE_BYTES>() else {
        return Some("it is shorter than its size".to_owned());
    };
    if u64::from_le_bytes(*size) != text.len() as u64 {
        return Some("it has another size than in the manifest".to_owned());
    }
    let metadata: Metadata = match serde_json::from_slice(text) {
        Ok(metadata) => metadata,
        Err(error) => return Some(error.to_string()),
    };
    let found = metadata.tensors();
    let mut found: Vec<_> = found
        .values()
        .map(|info| (info.data_offsets, info.dtype, info.shape.clone()))
        .collect();
    found.sort_unstable();
    expected.sort_unstable();
    (found != expected).then(|| "it has other tensors than the manifest says".to_owned())
}
