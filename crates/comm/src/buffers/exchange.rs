//! What a transport asks: can this tensor stay where it is, and where is one that came?

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use shardwright_core::Rank;
use shardwright_wire::codec::encode_placed;
use shardwright_wire::{Buffer, CodecError, Frame, Limits, Message, NoMemory, SharedPlace};

use super::SHARED_BYTES;
use super::import::{Import, ImportError};
use super::pool::{Offer, Pool};

/// A rank's persistent buffer, and those of the other ranks of its host.
#[derive(Default)]
pub struct Exchange {
    pool: Option<Arc<Pool>>,
    imports: BTreeMap<Rank, Arc<Import>>,
    lent: AtomicU64,
    lent_bytes: AtomicU64,
}

impl Exchange {
    /// Maps what the other ranks of this host offer. Ranks whose buffer cannot be mapped send bytes.
    pub fn new(pool: Option<Arc<Pool>>, own: Rank, offers: &BTreeMap<Rank, Offer>) -> Self {
        let mut imports = BTreeMap::new();
        for (rank, offer) in offers {
            match Import::open(offer, own) {
                Ok(import) => {
                    imports.insert(*rank, import);
                }
                Err(error) => {
                    tracing::warn!(rank = %own, peer = %rank, %error, "no shared memory with a rank of this host; its tensors travel inside messages");
                }
            }
        }
        Self {
            pool,
            imports,
            ..Self::default()
        }
    }

    /// The binary form of a message to a rank; its large tensors are lent to the rank where it
    /// has mapped this rank's buffer.
    pub fn encode(
        &self,
        to: Rank,
        message: &Message,
        limits: &Limits,
    ) -> Result<Frame, CodecError> {
        let pool = self.pool.as_ref().filter(|pool| pool.is_mapped_by(to));
        let (mut places, mut bytes) = (Vec::new(), 0);
        let frame = encode_placed(message, limits, &mut |buffer| {
            let place = lend(pool?, buffer)?;
            places.push(place);
            bytes += buffer.len() as u64;
            Some(place)
        });
        if frame.is_err() {
            for place in places {
                pool.inspect(|pool| pool.revoke(place));
            }
        } else if !places.is_empty() {
            self.lent.fetch_add(places.len() as u64, Ordering::Relaxed);
            self.lent_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        frame
    }

    /// The bytes that a message of a rank names.
    pub fn receive(
        &self,
        from: Rank,
        place: SharedPlace,
        bytes: usize,
    ) -> Result<Buffer, ImportError> {
        let import = self.imports.get(&from).ok_or(ImportError::NoSuchPlace {
            bytes,
            offset: place.offset,
            slot: place.slot,
        })?;
        import.receive(place, bytes)
    }

    /// Memory for bytes that follow in a frame: of this rank's buffer where there is room, so
    /// that its pages are warm.
    pub fn filled_by<E: From<NoMemory>>(
        &self,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Buffer, E> {
        match &self.pool {
            Some(pool) if bytes >= SHARED_BYTES => pool.filled_by(bytes, fill),
            _ => Buffer::filled_by(bytes, fill),
        }
    }

    /// Tensors lent so far, and their bytes.
    pub fn lent(&self) -> (u64, u64) {
        (
            self.lent.load(Ordering::Relaxed),
            self.lent_bytes.load(Ordering::Relaxed),
        )
    }

    /// Bytes of this rank's buffer that are in use, here or at peers.
    pub fn used_bytes(&self) -> u64 {
        self.pool.as_ref().map_or(0, |pool| pool.used_bytes())
    }
}

fn lend(pool: &Arc<Pool>, buffer: &Buffer) -> Option<SharedPlace> {
    (buffer.len() >= SHARED_BYTES)
        .then(|| pool.lend(buffer))
        .flatten()
}
