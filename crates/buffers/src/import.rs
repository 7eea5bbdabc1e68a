//! Another rank's persistent buffer, mapped here.

use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{OFlags, SealFlags, fcntl_get_seals};
use shardwright_core::Rank;
use shardwright_wire::{Buffer, SharedPlace};

use super::layout::{self, DeviceOffer, mapped, slot};
use super::pool::{LentRange, NAME, Offer};
use super::raw::{MappedRange, Mapping};
use shardwright_system::Owner;

/// Why another rank's memory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The system does not let this process at it: another container, or another user.
    #[error("cannot open {path}: {source}")]
    Open {
        /// Where it should be.
        path: String,
        /// Why not.
        source: io::Error,
    },
    /// What is there is something else.
    #[error("{path} is not the buffer that was offered: {reason}")]
    Other {
        /// Where it should be.
        path: String,
        /// What differs.
        reason: &'static str,
    },
    /// A message names a place that does not exist or is not lent.
    #[error("no block of {bytes} bytes is lent at {offset} with slot {slot}")]
    NoSuchPlace {
        /// The named bytes.
        bytes: usize,
        /// Where they should be.
        offset: u64,
        /// The named slot.
        slot: u32,
    },
    /// A message names a place in device memory, of which this rank has opened none.
    #[error("a tensor of {bytes} bytes lies in device memory, which is not open here")]
    NoDevice {
        /// The tensor's size.
        bytes: usize,
    },
}

/// Another rank's persistent buffer.
pub struct Import {
    mapping: Arc<Mapping>,
    own: Rank,
    owner: Owner,
}

/// A block that a peer has lent; given back when dropped.
pub struct TakenBlock {
    import: Arc<Import>,
    slot_word: usize,
}

impl Import {
    /// Maps what a rank of this host offers, and tells it so.
    pub fn open(offer: &Offer, own: Rank) -> Result<Arc<Self>, ImportError> {
        let path = format!("/proc/{}/fd/{}", offer.pid, offer.fd);
        let other = |reason| ImportError::Other {
            path: path.clone(),
            reason,
        };
        let failed = |source: io::Error| ImportError::Open {
            path: path.clone(),
            source,
        };
        let target = std::fs::read_link(&path).map_err(failed)?;
        // Opening anything else might wait, or do something.
        if !target
            .to_string_lossy()
            .starts_with(&format!("/memfd:{NAME}"))
        {
            return Err(other("it is no memory of this library"));
        }
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags((OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed())
            .open(&path)
            .map_err(failed)?;
        let seals = fcntl_get_seals(&file).map_err(|error| failed(error.into()))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(other("it could shrink"));
        }
        let bytes = file.metadata().map_err(failed)?.len();
        if bytes != offer.bytes || bytes < layout::HEAD_BYTES as u64 {
            return Err(other("its size differs"));
        }
        let mapping = Mapping::of(&file, bytes as usize).map_err(failed)?;
        if mapping.word(0).load(Ordering::Acquire) != layout::MAGIC {
            return Err(other("its layout is of another version"));
        }
        for (index, word) in offer.token.chunks_exact(4).enumerate() {
            let found = mapping
                .word(layout::token_word(index))
                .load(Ordering::Relaxed);
            if found.to_ne_bytes() != word {
                return Err(other("its token differs"));
            }
        }
        let Some(word) = layout::mapped_word(own) else {
            return Err(other("it has no room for a rank of this number"));
        };
        mapping.word(word).store(mapped::HOST, Ordering::Release);
        Ok(Arc::new(Self {
            mapping: Arc::new(mapping),
            own,
            owner: Owner::this_process(),
        }))
    }

    /// The bytes that a message names; given back when the buffer is dropped.
    pub fn receive(
        self: &Arc<Self>,
        place: SharedPlace,
        bytes: usize,
    ) -> Result<Buffer, ImportError> {
        let refused = || ImportError::NoSuchPlace {
            bytes,
            offset: place.offset,
            slot: place.slot,
        };
        let end = place.offset.checked_add(bytes as u64).ok_or_else(refused)?;
        if place.offset < layout::HEAD_BYTES as u64
            || end > self.mapping.len() as u64
            || !place.offset.is_multiple_of(layout::ALIGNMENT)
        {
            return Err(refused());
        }
        let held = self.take(place, bytes)?;
        Ok(Buffer::lent(Arc::new(LentRange {
            range: MappedRange::new(Arc::clone(&self.mapping), place.offset as usize, bytes),
            holder: held,
        })))
    }

    /// Takes over what is lent at a place, whose range the caller has checked.
    pub fn take(
        self: &Arc<Self>,
        place: SharedPlace,
        bytes: usize,
    ) -> Result<TakenBlock, ImportError> {
        let refused = || ImportError::NoSuchPlace {
            bytes,
            offset: place.offset,
            slot: place.slot,
        };
        let slot_word = layout::slot_word(place.slot).ok_or_else(refused)?;
        self.mapping
            .word(slot_word)
            .compare_exchange(slot::LENT, slot::TAKEN, Ordering::AcqRel, Ordering::Acquire)
            .map_err(|_| refused())?;
        Ok(TakenBlock {
            import: Arc::clone(self),
            slot_word,
        })
    }

    /// How to open the owner's buffer in device memory, if it has one.
    pub fn device_offer(&self) -> Option<DeviceOffer> {
        let offered = self.mapping.word(layout::DEVICE_OFFERED);
        (offered.load(Ordering::Acquire) == 1).then(|| {
            std::array::from_fn(|index| {
                let word = self.mapping.word(layout::device_word(index));
                word.load(Ordering::Relaxed)
            })
        })
    }

    /// Tells the owner that its buffer in device memory is about to be opened here; `None` where it offers it no more.
    pub fn opens_device(&self) -> Option<DeviceUse> {
        let held = DeviceUse {
            mapping: Arc::clone(&self.mapping),
            word: layout::mapped_word(self.own)?,
            owner: self.owner,
            after: mapped::HOST,
        };
        held.say(mapped::OPENING);
        // Against `Pool::withdraw_device`: dropping says that it is not open after all.
        let offered = self.mapping.word(layout::DEVICE_OFFERED);
        (offered.load(Ordering::SeqCst) == 1).then_some(held)
    }
}

/// A peer's buffer in device memory is in use here: its owner waits with freeing it until this is dropped.
pub struct DeviceUse {
    mapping: Arc<Mapping>,
    word: usize,
    owner: Owner,
    /// What is said when it is over.
    after: u32,
}

impl DeviceUse {
    /// It is open.
    pub fn opened(&self) {
        self.say(mapped::DEVICE);
    }

    /// The driver did not open it.
    pub fn refused(mut self) {
        self.after = mapped::REFUSED;
    }

    fn say(&self, what: u32) {
        self.mapping.word(self.word).store(what, Ordering::SeqCst);
    }
}

impl Drop for DeviceUse {
    fn drop(&mut self) {
        if self.owner.is_here() {
            self.say(self.after);
        }
    }
}

impl Drop for TakenBlock {
    fn drop(&mut self) {
        // The tensor of a forked child is the parent's (BU-4).
        if self.import.owner.is_here() {
            let word = self.import.mapping.word(self.slot_word);
            word.store(slot::FREE, Ordering::Release);
        }
    }
}
