//! Hashes of chunks. Pure.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

/// Files are hashed in chunks of this size, so that a rank verifies what it reads and little more.
pub const CHUNK_BYTES: u64 = 4 << 20;

/// The BLAKE3 hash of a chunk.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ChunkHash(blake3::Hash);

impl ChunkHash {
    /// The hash of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(blake3::hash(bytes))
    }
}

impl fmt::Debug for ChunkHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.to_hex())
    }
}

impl Serialize for ChunkHash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0.to_hex())
    }
}

impl<'de> Deserialize<'de> for ChunkHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        match blake3::Hash::from_hex(text.as_bytes()) {
            Ok(hash) if *hash.to_hex() == *text => Ok(Self(hash)),
            _ => Err(D::Error::custom(
                "a hash has 64 hexadecimal digits in lower case",
            )),
        }
    }
}

/// How many chunks a file of this size has.
pub(crate) fn num_chunks(bytes: u64) -> u64 {
    bytes.div_ceil(CHUNK_BYTES)
}

/// The hashes of all chunks of a file that holds these slices one after another.
pub fn hash_chunks<'a>(slices: impl IntoIterator<Item = &'a [u8]>) -> Vec<ChunkHash> {
    let mut hasher = ChunkHasher::default();
    for slice in slices {
        hasher.update(slice);
    }
    hasher.finish()
}

/// Hashes the chunks of a file while its bytes come.
#[derive(Debug, Default)]
pub(crate) struct ChunkHasher {
    done: Vec<ChunkHash>,
    open: blake3::Hasher,
}

impl ChunkHasher {
    /// Takes the next bytes.
    pub(crate) fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = (CHUNK_BYTES - self.open.count()) as usize;
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.open.update(now);
            if self.open.count() == CHUNK_BYTES {
                self.done.push(ChunkHash(self.open.finalize()));
                self.open.reset();
            }
            bytes = later;
        }
    }

    /// The hashes, of what is left at the end too.
    pub(crate) fn finish(mut self) -> Vec<ChunkHash> {
        if self.open.count() > 0 {
            self.done.push(ChunkHash(self.open.finalize()));
        }
        self.done
    }
}
