//! Persistent buffers in device memory: this rank's own, and those of peers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::CudaError;
use super::raw::{Device, MemoryHandle, Uuid};
use shardwright_buffers::{Allocator, Block, DeviceOffer, DeviceUse, Import, Pool};

/// Blocks begin at multiples of this, more than any copy of a device asks for.
const ALIGNMENT: u64 = 512;

/// The persistent buffer in device memory.
pub(super) struct DeviceBuffer {
    pub(super) device: Arc<Device>,
    pub(super) address: u64,
    pub(super) allocator: Mutex<Allocator>,
    /// Whose head says who has it open.
    pool: Arc<Pool>,
}

/// A block of it.
pub(super) struct DeviceBlock {
    pub(super) buffer: Arc<DeviceBuffer>,
    pub(super) block: Block,
}

/// A peer's device buffer, opened here.
pub(super) struct Opened {
    device: Arc<Device>,
    pub(super) address: u64,
    pub(super) bytes: u64,
    same_device: bool,
    /// Its owner frees it once this is dropped, which is after it was closed (CU-8).
    _in_use: DeviceUse,
}

/// What a peer's device buffer is to this rank.
pub struct PeerDevice {
    /// The peer's buffer in host memory, whose head says how to open the one in device memory.
    pub(super) import: Arc<Import>,
    /// Whether this rank has begun to open it.
    tried: AtomicBool,
    state: Mutex<PeerState>,
}

#[derive(Default)]
enum PeerState {
    #[default]
    Unknown,
    Open(Arc<Opened>),
    Refused(String),
}

impl PeerDevice {
    /// Of the peer whose buffer in host memory is this.
    pub fn of(import: Arc<Import>) -> Self {
        Self {
            import,
            tried: AtomicBool::new(false),
            state: Mutex::default(),
        }
    }

    /// The peer's buffer in host memory.
    pub fn import(&self) -> &Arc<Import> {
        &self.import
    }

    /// Whether the peer's device is this rank's, once its buffer is open.
    pub fn is_same_device(&self) -> Option<bool> {
        self.opened().map(|opened| opened.same_device)
    }

    /// Why it cannot be opened, where that was tried.
    pub fn refusal(&self) -> Option<String> {
        match &*lock(&self.state) {
            PeerState::Refused(reason) => Some(reason.clone()),
            PeerState::Unknown | PeerState::Open(_) => None,
        }
    }

    /// Whether nobody has tried to open it; the caller does.
    pub(super) fn try_once(&self) -> bool {
        !self.tried.swap(true, Ordering::Relaxed)
    }

    /// Whether somebody has tried.
    pub(super) fn is_tried(&self) -> bool {
        self.tried.load(Ordering::Relaxed)
    }

    pub(super) fn opened(&self) -> Option<Arc<Opened>> {
        match &*lock(&self.state) {
            PeerState::Open(opened) => Some(Arc::clone(opened)),
            PeerState::Unknown | PeerState::Refused(_) => None,
        }
    }

    pub(super) fn set(&self, outcome: Result<Opened, String>) {
        *lock(&self.state) = match outcome {
            Ok(opened) => PeerState::Open(Arc::new(opened)),
            Err(reason) => PeerState::Refused(reason),
        };
    }

    /// Nothing more comes from the peer: its buffer is closed as soon as no received tensor lies in it.
    pub fn close(&self) {
        self.tried.store(true, Ordering::Relaxed);
        let state = std::mem::take(&mut *lock(&self.state));
        drop(state);
    }
}

impl DeviceBuffer {
    pub(super) fn new(
        device: &Arc<Device>,
        bytes: u64,
        pool: &Arc<Pool>,
    ) -> Result<(Self, MemoryHandle), CudaError> {
        let address = device.allocate(bytes as usize)?;
        let buffer = Self {
            device: Arc::clone(device),
            address,
            allocator: Mutex::new(Allocator::new(bytes, ALIGNMENT)),
            pool: Arc::clone(pool),
        };
        let handle = device.share(address)?;
        Ok((buffer, handle))
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // What a driver does with memory that somebody has open is not defined (CU-8).
        self.pool.withdraw_device();
        let users = self.pool.device_users();
        if !users.is_empty() {
            tracing::warn!(
                ?users,
                "a device buffer stays until this process ends: other ranks have not closed it"
            );
        } else if let Err(error) = self.device.free(self.address) {
            tracing::debug!(%error, "the device buffer was gone before");
        }
    }
}

impl DeviceBlock {
    /// Room for so many bytes, where there is such.
    pub(super) fn of(buffer: &Arc<DeviceBuffer>, bytes: usize) -> Option<Self> {
        let block = lock(&buffer.allocator).allocate(bytes as u64)?;
        Some(Self {
            buffer: Arc::clone(buffer),
            block,
        })
    }

    pub(super) fn address(&self) -> u64 {
        self.buffer.address + self.block.offset
    }

    pub(super) fn offset(&self) -> u64 {
        self.block.offset
    }
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        if let Err(error) = lock(&self.buffer.allocator).free(self.block) {
            tracing::error!(%error, "a block of the device buffer was given back twice");
        }
    }
}

impl Opened {
    /// Opens what a peer offers, of which it was told before.
    pub(super) fn open(
        device: &Arc<Device>,
        offer: &Offered,
        in_use: DeviceUse,
    ) -> Result<Self, CudaError> {
        let address = match device.open_shared(offer.handle) {
            Ok(address) => address,
            Err(error) => {
                in_use.refused();
                return Err(error);
            }
        };
        in_use.opened();
        // Closed again where this rank does not keep it.
        let mut opened = Self {
            device: Arc::clone(device),
            address,
            bytes: 0,
            same_device: offer.uuid == device.uuid(),
            _in_use: in_use,
        };
        // What messages name has to lie inside what was opened, whatever its owner says of it.
        opened.bytes = device.bytes_from(address)?.min(offer.bytes);
        Ok(opened)
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let Err(error) = self.device.close_shared(self.address) {
            tracing::debug!(%error, "a peer's device buffer was gone before");
        }
    }
}

/// How a device buffer is to be opened.
pub(super) struct Offered {
    pub(super) uuid: Uuid,
    pub(super) bytes: u64,
    pub(super) handle: MemoryHandle,
}

impl From<Offered> for DeviceOffer {
    fn from(offered: Offered) -> Self {
        let bytes = offered.bytes.to_ne_bytes();
        let all = [&offered.uuid[..], &bytes, &offered.handle].concat();
        std::array::from_fn(|index| {
            let word = &all[index * 4..][..4];
            u32::from_ne_bytes(word.try_into().expect("four bytes were taken"))
        })
    }
}

impl From<DeviceOffer> for Offered {
    fn from(words: DeviceOffer) -> Self {
        let all: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
        let (uuid, rest) = all.split_at(16);
        let (bytes, handle) = rest.split_at(8);
        Self {
            uuid: uuid.try_into().expect("16 bytes were taken"),
            bytes: u64::from_ne_bytes(bytes.try_into().expect("eight bytes were taken")),
            handle: handle.try_into().expect("the rest is the handle"),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
