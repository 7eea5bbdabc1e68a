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
    fn num_bytes(&self) -> Option<u64> {
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

/// Bytes aligned for any dtype, shared without copying.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Buffer {
    words: Arc<Vec<u128>>,
    len: usize,
}

impl Buffer {
    /// An owner of `len` zero bytes, and the way to fill them once.
    pub fn filled_by<E>(
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Self, E> {
        let mut words = vec![0_u128; len.div_ceil(16)];
        fill(&mut bytemuck::cast_slice_mut(&mut words)[..len])?;
        Ok(Self {
            words: Arc::new(words),
            len,
        })
    }

    /// Takes memory over whose first `len` bytes count. It may have room for more.
    pub fn from_words(words: Vec<u128>, len: usize) -> Self {
        assert!(
            len.div_ceil(16) == words.len(),
            "{len} bytes are not {} words",
            words.len()
        );
        Self {
            words: Arc::new(words),
            len,
        }
    }

    /// The memory itself, unless somebody else shares it.
    pub fn try_into_words(self) -> Result<Vec<u128>, Self> {
        let len = self.len;
        Arc::try_unwrap(self.words).map_err(|words| Self { words, len })
    }

    /// The memory itself, of whole words; copied only where somebody else shares it.
    pub fn into_words(self) -> Vec<u128> {
        Arc::unwrap_or_clone(self.words)
    }

    /// A copy of `bytes`, written once, where [`Self::filled_by`] writes zeros before.
    pub fn copy_of(bytes: &[u8]) -> Self {
        let whole = bytes.chunks_exact(16);
        let mut tail = [0; 16];
        tail[..whole.remainder().len()].copy_from_slice(whole.remainder());
        let mut words = Vec::with_capacity(bytes.len().div_ceil(16));
        words.extend(
            whole.map(|word| u128::from_ne_bytes(word.try_into().expect("chunks are of 16 bytes"))),
        );
        if words.len() * 16 < bytes.len() {
            words.push(u128::from_ne_bytes(tail));
        }
        Self {
            words: Arc::new(words),
            len: bytes.len(),
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_hold_the_bytes_whatever_their_number() {
        for len in 0..70_u8 {
            let bytes: Vec<u8> = (1..=len).collect();
            let copy = Buffer::copy_of(&bytes);
            assert_eq!(copy.as_bytes(), bytes);
            assert_eq!(copy.words.len(), bytes.len().div_ceil(16));
        }
    }
}
