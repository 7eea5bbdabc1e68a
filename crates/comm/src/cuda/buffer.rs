//! Persistent buffers in device memory: this rank's own, and those of peers.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::device::Registration;
use super::error::CudaError;
use super::raw::{Device, MemoryHandle, Uuid};
use crate::buffers::{Allocator, Block, DeviceOffer};
use crate::routing::Devices;

/// Blocks begin at multiples of this, more than any copy of a device asks for.
const ALIGNMENT: u64 = 512;

/// The persistent buffer in device memory.
pub(super) struct DeviceBuffer {
    pub(super) device: Arc<Device>,
    pub(super) address: u64,
    pub(super) allocator: Mutex<Allocator>,
}

/// A block of it.
pub(super) struct DeviceBlock {
    pub(super) buffer: Arc<DeviceBuffer>,
    pub(super) block: Block,
}

/// A peer's device buffer, opened here.
pub(crate) struct Opened {
    pub(super) device: Arc<Device>,
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) same_device: bool,
}

/// What a peer's buffers are to this rank's device.
#[derive(Default)]
pub(crate) struct PeerDevice {
    pub(super) registering: AtomicBool,
    pub(super) registration: OnceLock<Registration>,
    pub(super) opening: AtomicBool,
    pub(super) opened: OnceLock<Opened>,
}

impl PeerDevice {
    /// How the peer's device stands to this rank's, once its buffer is open.
    pub(crate) fn devices(&self) -> Option<Devices> {
        self.opened.get().map(Opened::devices)
    }
}

impl DeviceBuffer {
    pub(super) fn new(device: &Arc<Device>, bytes: u64) -> Result<(Self, MemoryHandle), CudaError> {
        let address = device.allocate(bytes as usize)?;
        let buffer = Self {
            device: Arc::clone(device),
            address,
            allocator: Mutex::new(Allocator::new(bytes, ALIGNMENT)),
        };
        let handle = device.share(address)?;
        Ok((buffer, handle))
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if let Err(error) = self.device.free(self.address) {
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
    /// How the peer's device stands to this rank's.
    pub(crate) fn devices(&self) -> Devices {
        if self.same_device {
            Devices::Same
        } else {
            Devices::Peers
        }
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
