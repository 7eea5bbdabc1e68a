//! Tensors on their way, as the buffers of messages.

use std::any::Any;
use std::sync::{Arc, OnceLock};

use shardwright_wire::{Buffer, Lent};

use super::buffer::{DeviceBlock, Opened};
use super::device::StageError;
use super::error::CudaError;
use super::memory::DeviceMemory;
use super::raw::CudaEvent;
use shardwright_buffers::TakenBlock;

/// A tensor of this rank's device that leaves, in one of its persistent buffers.
pub struct DeviceTensor {
    memory: Arc<DeviceMemory>,
    bytes: usize,
    /// In device memory; `None` where there was no room, and the tensor was copied to the host at once.
    block: Option<DeviceBlock>,
    ready: Option<CudaEvent>,
    staged: OnceLock<Result<Buffer, StageError>>,
}

impl DeviceTensor {
    pub(super) fn on_device(
        memory: &Arc<DeviceMemory>,
        block: DeviceBlock,
        bytes: usize,
        ready: CudaEvent,
    ) -> Self {
        Self {
            memory: Arc::clone(memory),
            bytes,
            block: Some(block),
            ready: Some(ready),
            staged: OnceLock::new(),
        }
    }

    pub(super) fn on_host(
        memory: &Arc<DeviceMemory>,
        staged: Buffer,
        bytes: usize,
        ready: CudaEvent,
    ) -> Self {
        Self {
            memory: Arc::clone(memory),
            bytes,
            block: None,
            ready: Some(ready),
            staged: OnceLock::from(Ok(staged)),
        }
    }

    /// The tensor of a device that a buffer is.
    pub fn of(buffer: &Buffer) -> Option<Arc<Self>> {
        let memory: Arc<dyn Any + Send + Sync> = Arc::<dyn Lent>::clone(buffer.as_lent()?);
        memory.downcast().ok()
    }

    /// Whether it has been copied out of torch's memory.
    pub fn is_ready(&self) -> Result<bool, CudaError> {
        self.ready.as_ref().map_or(Ok(true), CudaEvent::is_done)
    }

    /// Where it lies in the device buffer.
    pub(super) fn offset(&self) -> Option<u64> {
        Some(self.block.as_ref()?.offset())
    }

    /// The most bytes that it can have in the device buffer: its own, where it lies there.
    pub fn device_room(&self) -> u64 {
        self.block.as_ref().map_or(0, |_| self.num_bytes())
    }

    /// How many bytes it has.
    pub fn num_bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// Its bytes in host memory, when it is ready; copied at most once.
    pub fn on_host_now(&self) -> Result<&Buffer, StageError> {
        let staged = self.staged.get_or_init(|| match &self.block {
            Some(block) => self.memory.stage(block.address(), self.bytes),
            None => Err(StageError::Gone),
        });
        staged.as_ref().map_err(Clone::clone)
    }
}

impl Lent for DeviceTensor {
    fn prepare(&self) -> Result<(), String> {
        let ready = self.ready.as_ref();
        let ready = ready.map_or(Ok(()), |ready| self.memory.wait(ready));
        let staged = ready.and_then(|()| self.on_host_now().map(drop));
        staged.map_err(|error| error.to_string())
    }

    fn as_bytes(&self) -> &[u8] {
        prepared(self.prepare(), || self.on_host_now().ok())
    }

    fn len(&self) -> usize {
        self.bytes
    }

    fn start(&self) -> *mut u8 {
        self.as_bytes().as_ptr().cast_mut()
    }
}

impl Drop for DeviceTensor {
    fn drop(&mut self) {
        // A copy that is still under way writes to what would be somebody else's by then (CU-2).
        if let Some(ready) = self.ready.take()
            && !ready.is_done().unwrap_or(false)
        {
            let kept = (self.block.take(), self.staged.take());
            self.memory.keep(ready, Box::new(kept));
        }
    }
}

/// A tensor in a peer's device buffer, in this process's hands until dropped.
pub(super) struct ReceivedTensor {
    memory: Arc<DeviceMemory>,
    address: u64,
    bytes: usize,
    staged: OnceLock<Result<Buffer, StageError>>,
    _held: TakenBlock,
    /// Closed when nothing is received there any more.
    _opened: Arc<Opened>,
}

impl ReceivedTensor {
    pub(super) fn new(
        memory: &Arc<DeviceMemory>,
        opened: Arc<Opened>,
        address: u64,
        bytes: usize,
        held: TakenBlock,
    ) -> Self {
        Self {
            memory: Arc::clone(memory),
            address,
            bytes,
            staged: OnceLock::new(),
            _held: held,
            _opened: opened,
        }
    }

    /// Where it is, as this rank's device sees it.
    pub(super) fn address(&self) -> u64 {
        self.address
    }

    fn on_host(&self) -> Result<&Buffer, StageError> {
        let stage = || self.memory.stage(self.address, self.bytes);
        self.staged
            .get_or_init(stage)
            .as_ref()
            .map_err(Clone::clone)
    }
}

impl Lent for ReceivedTensor {
    fn prepare(&self) -> Result<(), String> {
        self.on_host().map(drop).map_err(|error| error.to_string())
    }

    fn as_bytes(&self) -> &[u8] {
        prepared(self.prepare(), || self.on_host().ok())
    }

    fn len(&self) -> usize {
        self.bytes
    }

    fn start(&self) -> *mut u8 {
        self.as_bytes().as_ptr().cast_mut()
    }
}

/// The bytes of what was prepared. Whoever may meet a device that fails has looked at that before.
fn prepared<'a>(
    outcome: Result<(), String>,
    staged: impl FnOnce() -> Option<&'a Buffer>,
) -> &'a [u8] {
    if let Err(error) = outcome {
        tracing::error!(%error, "a tensor of a device cannot be read");
        return &[];
    }
    staged().map_or(&[], Buffer::as_bytes)
}
