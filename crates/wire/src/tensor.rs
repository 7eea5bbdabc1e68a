//! Tensors as they cross ranks: a description and the bytes.

use shardwright_core::{Rank, RequestId};

use crate::buffer::Buffer;

/// What the receiver needs to rebuild a tensor. Sizes and strides are in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMeta {
    /// The dtype's name without the `torch.` prefix.
    pub dtype: String,
    /// The sizes.
    pub shape: Vec<u64>,
    /// The strides of a dense tensor; the bytes lie in storage order.
    pub strides: Vec<u64>,
    /// The device's type at the sender (`cpu`, `cuda`).
    pub device: String,
    /// Whether a gradient has to come back.
    pub requires_grad: bool,
}

/// The bytes of one element of a dtype, by its name without the `torch.` prefix;
/// `None` for a dtype that cannot cross ranks.
pub fn dtype_bytes(name: &str) -> Option<u64> {
    Some(match name {
        "bool" | "uint8" | "int8" | "float8_e4m3fn" | "float8_e4m3fnuz" | "float8_e5m2"
        | "float8_e5m2fnuz" | "float8_e8m0fnu" => 1,
        "uint16" | "int16" | "float16" | "bfloat16" => 2,
        "uint32" | "int32" | "float32" | "complex32" => 4,
        "uint64" | "int64" | "float64" | "complex64" => 8,
        "complex128" => 16,
        _ => return None,
    })
}

impl TensorMeta {
    /// Whether so many bytes hold a dense tensor of this description.
    pub fn fits(&self, bytes: u64) -> bool {
        self.num_bytes() == Some(bytes)
    }

    /// The bytes of a dense tensor of this description, if there is such a one.
    pub fn num_bytes(&self) -> Option<u64> {
        let element = dtype_bytes(&self.dtype)?;
        if self.shape.len() != self.strides.len() {
            return None;
        }
        let count = self
            .shape
            .iter()
            .try_fold(1_u64, |count, size| count.checked_mul(*size))?;
        if count == 0 {
            return Some(0);
        }
        let last = self
            .shape
            .iter()
            .zip(&self.strides)
            .try_fold(0_u64, |last, (size, stride)| {
                last.checked_add((size - 1).checked_mul(*stride)?)
            })?;
        if last >= count {
            return None;
        }
        count.checked_mul(element)
    }
}

/// One tensor of a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPart {
    /// The description.
    pub meta: TensorMeta,
    /// The bytes, in storage order; none where they are held elsewhere.
    pub data: Buffer,
    /// Where the bytes are to be had, if they are not here or not only here.
    pub held: Option<HeldTensor>,
}

impl TensorPart {
    /// A tensor with its bytes.
    pub fn new(meta: TensorMeta, data: Buffer) -> Self {
        Self {
            meta,
            data,
            held: None,
        }
    }

    /// Whether the bytes are here. A tensor without elements that is held elsewhere is not: ranks whose batches have other
    /// sizes ask for theirs too.
    pub fn is_here(&self) -> bool {
        self.held.is_none() || !self.data.is_empty() && self.meta.fits(self.data.len() as u64)
    }
}

/// A tensor of a response that stays with the rank which made it, until somebody asks for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HeldTensor {
    /// The rank that holds it.
    pub holder: Rank,
    /// The rank that got the response.
    pub requester: Rank,
    /// The request that it is a result of.
    pub request: RequestId,
    /// Which tensor of the response.
    pub index: u32,
}
