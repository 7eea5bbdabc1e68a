//! How a persistent buffer is laid out: its head, in words of 32 bits, then the blocks.

use shardwright_core::Rank;

/// The first word; another layout gets another number.
pub(super) const MAGIC: u32 = 0x5348_5703;

/// Bytes of the token that tells a buffer from any other memory.
pub(super) const TOKEN_BYTES: usize = 16;

/// Ranks that can say that they have mapped the buffer. Others are sent bytes.
pub(super) const MAX_RANKS: u32 = 4096;

/// Blocks that can be lent at once.
pub(super) const SLOTS: u32 = 1 << 15;

/// Where the blocks begin.
pub(super) const HEAD_BYTES: usize = 256 << 10;

/// Blocks begin at multiples of this: a cache line, more than any dtype asks for.
pub(super) const ALIGNMENT: u64 = 64;

const TOKEN: usize = 16;
const MAPPED: usize = 4096;
const SLOT: usize = MAPPED + MAX_RANKS as usize * 4;
const DEVICE: usize = SLOT + SLOTS as usize * 4;
const _: () = assert!(DEVICE + (DEVICE_OFFER_WORDS + 1) * 4 <= HEAD_BYTES);

/// What the word of a rank says that has mapped the buffer, and of the one beside it in device memory.
pub(super) mod mapped {
    /// Only this buffer is mapped.
    pub(crate) const HOST: u32 = 1;
    /// The device's is being opened, or closed.
    pub(crate) const OPENING: u32 = 2;
    /// The device's is open, too.
    pub(crate) const DEVICE: u32 = 3;
    /// The driver does not open the device's for this rank.
    pub(crate) const REFUSED: u32 = 4;
}

/// Words that say how the owner's device buffer is to be opened: its device, its size, and the driver's handle.
const DEVICE_OFFER_WORDS: usize = 4 + 2 + 16;

/// How a device buffer is to be opened, as words.
pub type DeviceOffer = [u32; DEVICE_OFFER_WORDS];

/// What a slot's word says.
pub(super) mod slot {
    /// Not lent, or given back.
    pub(crate) const FREE: u32 = 0;
    /// Lent; the receiver has not looked yet.
    pub(crate) const LENT: u32 = 1;
    /// With the receiver.
    pub(crate) const TAKEN: u32 = 2;
}

pub(super) fn token_word(index: usize) -> usize {
    TOKEN + index * 4
}

/// The word in which a rank says that it has mapped the buffer.
pub(super) fn mapped_word(rank: Rank) -> Option<usize> {
    (rank.0 < MAX_RANKS).then(|| MAPPED + rank.0 as usize * 4)
}

/// The word that is 1 once the owner has a device buffer and the words behind it say how to open that.
pub(super) const DEVICE_OFFERED: usize = DEVICE;

/// A word of what [`DEVICE_OFFERED`] promises.
pub(super) fn device_word(index: usize) -> usize {
    DEVICE + 4 + index * 4
}

/// The word of a slot.
pub(super) fn slot_word(slot: u32) -> Option<usize> {
    (slot < SLOTS).then(|| SLOT + slot as usize * 4)
}
