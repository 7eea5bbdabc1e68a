//! Memory for tensors' bytes: on the heap, or lent by a transport.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// Memory that a transport lends, and takes back when it is dropped.
///
/// Its start is aligned for any dtype. While only one [`Arc`] of it exists, nobody else
/// reads or writes it.
pub trait Lent: Any + Send + Sync {
    /// Waits until the bytes can be looked at, copying those of device memory to the host; why they cannot.
    fn prepare(&self) -> Result<(), String> {
        Ok(())
    }

    /// The bytes; none where they cannot be prepared.
    fn as_bytes(&self) -> &[u8];

    /// How many bytes, without a look at them.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where the bytes begin, for the sole owner to write through.
    fn start(&self) -> *mut u8;
}

/// Bytes aligned for any dtype, shared without copying.
#[derive(Clone)]
pub struct Buffer(Memory);

#[derive(Clone)]
enum Memory {
    Heap { words: Arc<Vec<u128>>, len: usize },
    Lent(Arc<dyn Lent>),
}

/// The memory of a buffer that nobody shares.
pub enum Owned {
    /// Whole words of the heap; the buffer's bytes are the first of them.
    Heap(Vec<u128>),
    /// Lent memory.
    Lent(Arc<dyn Lent>),
}

/// This host cannot hold a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no memory for a tensor of {bytes} bytes")]
pub struct NoMemory {
    /// The tensor's size.
    pub bytes: usize,
}

impl Buffer {
    /// An owner of `len` zero bytes, and the way to fill them once. A size that a peer has only
    /// announced must not end the process, so memory that is not there is an error.
    pub fn filled_by<E: From<NoMemory>>(
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Self, E> {
        let mut words = bytemuck::try_zeroed_vec::<u128>(len.div_ceil(16))
            .map_err(|()| NoMemory { bytes: len })?;
        fill(&mut bytemuck::cast_slice_mut(&mut words)[..len])?;
        Ok(Self::heap(words, len))
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
        Self::heap(words, bytes.len())
    }

    /// Takes memory over whose first `len` bytes count.
    ///
    /// # Panics
    /// When the words do not hold just these bytes.
    pub fn from_words(words: Vec<u128>, len: usize) -> Self {
        assert!(
            len.div_ceil(16) == words.len(),
            "{len} bytes are not {} words",
            words.len()
        );
        Self::heap(words, len)
    }

    /// Lent memory.
    pub fn lent(memory: Arc<dyn Lent>) -> Self {
        Self(Memory::Lent(memory))
    }

    /// The lent memory, if it is such.
    pub fn as_lent(&self) -> Option<&Arc<dyn Lent>> {
        match &self.0 {
            Memory::Lent(memory) => Some(memory),
            Memory::Heap { .. } => None,
        }
    }

    /// Waits until the bytes can be looked at, which may fail for memory of a device.
    pub fn prepare(&self) -> Result<(), String> {
        self.as_lent().map_or(Ok(()), |lent| lent.prepare())
    }

    /// The memory itself; a copy of it where somebody else shares it.
    pub fn into_owned(self) -> Owned {
        match self.0 {
            Memory::Heap { words, .. } => Owned::Heap(Arc::unwrap_or_clone(words)),
            Memory::Lent(memory) if Arc::strong_count(&memory) == 1 => Owned::Lent(memory),
            Memory::Lent(memory) => Self::copy_of(memory.as_bytes()).into_owned(),
        }
    }

    /// The heap memory itself, unless somebody else shares it or it is lent.
    pub fn try_into_words(self) -> Result<Vec<u128>, Self> {
        match self.0 {
            Memory::Heap { words, len } => {
                Arc::try_unwrap(words).map_err(|words| Self(Memory::Heap { words, len }))
            }
            lent @ Memory::Lent(_) => Err(Self(lent)),
        }
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        match &self.0 {
            Memory::Heap { words, len } => &bytemuck::cast_slice(words)[..*len],
            Memory::Lent(memory) => memory.as_bytes(),
        }
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        match &self.0 {
            Memory::Heap { len, .. } => *len,
            Memory::Lent(memory) => memory.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn heap(words: Vec<u128>, len: usize) -> Self {
        Self(Memory::Heap {
            words: Arc::new(words),
            len,
        })
    }
}

impl Default for Buffer {
    fn default() -> Self {
        Self::heap(Vec::new(), 0)
    }
}

impl PartialEq for Buffer {
    fn eq(&self, other: &Self) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}

impl Eq for Buffer {}

impl fmt::Debug for Buffer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match &self.0 {
            Memory::Heap { .. } => "heap",
            Memory::Lent(_) => "lent",
        };
        write!(formatter, "Buffer({kind}, {} bytes)", self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Borrowed(Box<[u8]>);

    impl Lent for Borrowed {
        fn as_bytes(&self) -> &[u8] {
            &self.0
        }

        fn len(&self) -> usize {
            self.0.len()
        }

        fn start(&self) -> *mut u8 {
            self.0.as_ptr().cast_mut()
        }
    }

    #[test]
    fn copies_hold_the_bytes_whatever_their_number() {
        for len in 0..70_u8 {
            let bytes: Vec<u8> = (1..=len).collect();
            let copy = Buffer::copy_of(&bytes);
            assert_eq!(copy.as_bytes(), bytes);
            let Owned::Heap(words) = copy.into_owned() else {
                panic!("a copy lies on the heap");
            };
            assert_eq!(words.len(), bytes.len().div_ceil(16));
        }
    }

    #[test]
    fn lent_memory_is_handed_on_by_its_sole_owner_and_copied_by_others() {
        let buffer = Buffer::lent(Arc::new(Borrowed(Box::new([1, 2, 3]))));
        assert_eq!(buffer, Buffer::copy_of(&[1, 2, 3]));
        assert!(matches!(buffer.clone().into_owned(), Owned::Heap(_)));
        assert!(matches!(buffer.into_owned(), Owned::Lent(_)));
    }
}
