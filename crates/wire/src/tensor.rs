//! Tensors as they cross ranks: a description and the bytes.

use std::sync::Arc;

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

/// Bytes aligned for any dtype, shared without copying.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    words: Arc<Vec<u128>>,
    len: usize,
}

impl Buffer {
    /// An owner of `len` zero bytes, and the way to fill them once.
    pub fn filled_by<E>(len: usize, fill: impl FnOnce(&mut [u8]) -> Result<(), E>) -> Result<Self, E> {
        let mut words = vec![0_u128; len.div_ceil(16)];
        fill(&mut bytemuck::cast_slice_mut(&mut words)[..len])?;
        Ok(Self { words: Arc::new(words), len })
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// One tensor of a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPart {
    /// The description.
    pub meta: TensorMeta,
    /// The bytes, in storage order.
    pub data: Buffer,
}
