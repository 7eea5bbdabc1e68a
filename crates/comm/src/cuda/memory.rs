//! What a rank has of its device: a persistent buffer, and the copies out of it and into it.

use std::any::Any;
use std::ffi::OsStr;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crossbeam_channel::{Receiver as Outlet, Sender, bounded};
use shardwright_wire::{Buffer, SharedMemory, SharedPlace};

use super::buffer::{DeviceBlock, DeviceBuffer, Offered, Opened};
use super::device::{Active, COPY_DEADLINE, Registration, StageError, wait};
use super::error::CudaError;
use super::raw::{Device, Driver, Event, Stream};
use super::tensor::{DeviceTensor, ReceivedTensor};
use crate::buffers::{Import, ImportError, Pool, SHARED_BYTES};
use crate::owner::Owner;

/// What the thread may leave untaken; it keeps its own queues, and takes all at each turn.
const INBOX_CAPACITY: usize = 8192;

/// A rank's device, from the first tensor on that is sent from it or received there.
pub struct DeviceMemory {
    driver: Arc<Driver>,
    // Before the pool, whose memory it has registered.
    active: OnceLock<Option<Active>>,
    pool: Arc<Pool>,
    bytes: u64,
    owner: Owner,
    inbox: Sender<Job>,
    outlet: Mutex<Option<Outlet<Job>>>,
}

/// Work for the thread of [`super::Ordered`].
pub(super) enum Job {
    /// A message for a rank, with tensors of a device.
    Send(shardwright_core::Rank, shardwright_wire::Message),
    /// Something that stays until an event is done.
    Keep(Event, Box<dyn Any + Send>),
    /// A peer's host buffer is to be registered.
    Register(Arc<Import>),
    /// A peer's device buffer is to be opened.
    Open(Arc<Import>),
    /// The thread is to end.
    Close,
}

impl DeviceMemory {
    /// Loads the driver from a path, or by its name. `bytes` is the size of the device buffer; 0 for none. Blocks are
    /// given back, and tensors staged, by way of the host's buffer.
    pub fn load(library: &OsStr, pool: Arc<Pool>, bytes: u64) -> Result<Arc<Self>, String> {
        let driver = Driver::load(library)?;
        let (inbox, outlet) = bounded(INBOX_CAPACITY);
        Ok(Arc::new(Self {
            driver,
            pool,
            bytes,
            owner: Owner::this_process(),
            active: OnceLock::new(),
            inbox,
            outlet: Mutex::new(Some(outlet)),
        }))
    }

    /// A tensor that leaves torch: queues its copy out of device memory at `address` behind what the stream has been
    /// given so far. `None` where there is no way, or no room, for it.
    ///
    /// The memory stays the tensor's, and unchanged, as the stream sees it.
    pub fn send_from(
        self: &Arc<Self>,
        ordinal: i32,
        address: u64,
        bytes: usize,
        stream: u64,
    ) -> Option<Buffer> {
        let active = self.active(ordinal).filter(|_| bytes > 0)?;
        // A small one travels inside its message.
        let block = (bytes >= SHARED_BYTES).then(|| self.device_block(active, bytes));
        let tensor = if let Some(block) = block.flatten() {
            let ready = active.copy(block.address(), address, bytes, stream);
            ready.map(|ready| DeviceTensor::on_device(self, block, bytes, ready))
        } else {
            // A copy to memory that is not registered would wait for the device.
            let staged = self.pool.reserve(bytes);
            let staged = staged.filter(|_| active.registration.is_some())?;
            let to = staged.as_lent()?.start().expose_provenance() as u64;
            let ready = active.copy(to, address, bytes, stream);
            ready.map(|ready| DeviceTensor::on_host(self, staged, bytes, ready))
        };
        match tensor {
            Ok(tensor) => Some(Buffer::lent(Arc::new(tensor))),
            Err(error) => {
                tracing::warn!(%error, "a tensor of a device goes through torch's own memory");
                None
            }
        }
    }

    /// A received tensor: queues its copy into device memory at `address` on the stream, and keeps it until that is
    /// done. `false` where there is no way.
    ///
    /// The memory stays the tensor's, and unused, as the stream sees it.
    pub fn receive_into(
        self: &Arc<Self>,
        data: &Buffer,
        ordinal: i32,
        address: u64,
        stream: u64,
    ) -> bool {
        if data.is_empty() {
            return true;
        }
        let Some(active) = self.active(ordinal) else {
            return false;
        };
        let received = data.as_lent().and_then(|lent| {
            let lent: &dyn Any = &**lent;
            lent.downcast_ref::<ReceivedTensor>()
        });
        let from = match received {
            Some(received) => received.address(),
            None => data.as_bytes().as_ptr().expose_provenance() as u64,
        };
        match active.copy(address, from, data.len(), stream) {
            Ok(done) => {
                self.keep(done, Box::new(data.clone()));
                true
            }
            Err(error) => {
                tracing::warn!(%error, "a received tensor goes through torch's own memory");
                false
            }
        }
    }

    /// A tensor that a peer's message names, in its device buffer.
    pub(crate) fn receive(
        self: &Arc<Self>,
        import: &Arc<Import>,
        place: SharedPlace,
        bytes: usize,
    ) -> Result<Buffer, ImportError> {
        let opened = import.device.opened.get();
        let inside = opened.filter(|opened| {
            let end = place.offset.checked_add(bytes as u64);
            end.is_some_and(|end| end <= opened.bytes)
        });
        let opened = inside.ok_or(ImportError::NoSuchPlace {
            bytes,
            offset: place.offset,
            slot: place.slot,
        })?;
        let address = opened.address + place.offset;
        let held = import.take(place, bytes)?;
        let tensor = ReceivedTensor::new(self, address, bytes, held);
        Ok(Buffer::lent(Arc::new(tensor)))
    }

    /// Has a peer's buffers registered and opened once this rank uses a device; asked for each tensor.
    pub(crate) fn open(&self, import: &Arc<Import>) {
        if !self.active.get().is_some_and(Option::is_some) {
            return;
        }
        let register = !import.device.registering.swap(true, Ordering::Relaxed);
        let register = register.then(|| Job::Register(Arc::clone(import)));
        let open = self.bytes > 0
            && import.device_offer().is_some()
            && !import.device.opening.swap(true, Ordering::Relaxed);
        let open = open.then(|| Job::Open(Arc::clone(import)));
        for job in register.into_iter().chain(open) {
            if self.inbox.try_send(job).is_err() {
                tracing::debug!(
                    "a peer's buffers stay without the device: the connection is closed, or very busy"
                );
            }
        }
    }

    /// Registers a peer's host buffer.
    pub(super) fn register_now(&self, import: &Import) {
        let Some(Some(active)) = self.active.get() else {
            return;
        };
        match Registration::of(&active.device, import.range()) {
            Ok(registration) => drop(import.device.registration.set(registration)),
            Err(error) => {
                tracing::info!(%error, "a peer's host buffer stays without registration");
            }
        }
    }

    /// Opens a peer's device buffer.
    pub(super) fn open_now(&self, import: &Import) {
        let (Some(Some(active)), Some(offer)) = (self.active.get(), import.device_offer()) else {
            return;
        };
        let offer = Offered::from(offer);
        let opened = active.device.open_shared(offer.handle).and_then(|address| {
            // Closed again where this rank does not keep it.
            let mut opened = Opened {
                device: Arc::clone(&active.device),
                address,
                bytes: 0,
                same_device: offer.uuid == active.device.uuid(),
            };
            // What messages name has to lie inside what was opened, whatever its owner says of it.
            opened.bytes = active.device.bytes_from(address)?.min(offer.bytes);
            Ok(opened)
        });
        match opened {
            Ok(opened) => {
                let devices = opened.devices();
                if import.device.opened.set(opened).is_ok() {
                    import.device_is_mapped();
                }
                tracing::debug!(?devices, "a peer's device buffer is open");
            }
            Err(error) => {
                tracing::info!(%error, "a peer's device buffer cannot be opened; its tensors go through host memory");
            }
        }
    }

    /// Lends a tensor to a rank that has opened the device buffer, which only reads it (CU-6): so others may hold it
    /// too, and it may be lent to several; `None` when it is not there, or too many blocks are lent.
    pub(crate) fn lend(&self, tensor: &Arc<DeviceTensor>) -> Option<SharedPlace> {
        let offset = tensor.offset().filter(|_| self.owner.is_here())?;
        let kept: Arc<dyn Any + Send + Sync> = Arc::clone(tensor) as _;
        self.pool.lend_block(SharedMemory::Device, offset, kept)
    }

    /// Whether there may be transfers from device to device at all.
    pub(crate) fn is_enabled(&self) -> bool {
        self.bytes > 0
    }

    /// Keeps something until an event is done (CU-2).
    pub(super) fn keep(&self, done: Event, kept: Box<dyn Any + Send>) {
        // Never waits for room: the thread itself may be the caller.
        if let Err(refused) = self.inbox.try_send(Job::Keep(done, kept))
            && let Job::Keep(done, kept) = refused.into_inner()
            && !wait(&done, COPY_DEADLINE).unwrap_or(false)
        {
            // Better lost than written to by a device.
            std::mem::forget(kept);
        }
    }

    /// Copies device memory to the host, and waits for it; what it reads has to be there already.
    pub(super) fn stage(&self, address: u64, bytes: usize) -> Result<Buffer, StageError> {
        let active = self.active.get().and_then(Option::as_ref);
        let active = active.ok_or(StageError::Gone)?;
        let copy = |to: u64| {
            let done = active.copy(to, address, bytes, active.side.handle())?;
            if wait(&done, COPY_DEADLINE)? {
                Ok(())
            } else {
                Err(StageError::Slow)
            }
        };
        if let Some(staged) = self.pool.reserve(bytes) {
            let start = staged.as_lent().map(|lent| lent.start());
            copy(start.map_or(0, |start| start.expose_provenance() as u64))?;
            return Ok(staged);
        }
        Buffer::filled_by(bytes, |into| {
            copy(into.as_mut_ptr().expose_provenance() as u64)
        })
    }

    pub(super) fn inbox(&self) -> &Sender<Job> {
        &self.inbox
    }

    /// What the thread takes its work from; once.
    pub(super) fn outlet(&self) -> Option<Outlet<Job>> {
        let mut outlet = self.outlet.lock().unwrap_or_else(PoisonError::into_inner);
        outlet.take()
    }

    fn device_block(&self, active: &Active, bytes: usize) -> Option<DeviceBlock> {
        let buffer = active.buffer.as_ref()?;
        DeviceBlock::of(buffer, bytes).or_else(|| {
            self.pool.take_back(usize::MAX);
            DeviceBlock::of(buffer, bytes)
        })
    }

    /// The device, if it is the one of this number; the first tensor decides.
    fn active(&self, ordinal: i32) -> Option<&Active> {
        if !self.owner.is_here() {
            return None;
        }
        let active = self.active.get_or_init(|| match self.activate(ordinal) {
            Ok(active) => Some(active),
            Err(error) => {
                tracing::warn!(%error, "tensors of devices go through torch's own host memory");
                None
            }
        });
        active.as_ref().filter(|active| active.ordinal == ordinal)
    }

    fn activate(&self, ordinal: i32) -> Result<Active, CudaError> {
        let device = Device::open(&self.driver, ordinal)?;
        let side = Stream::new(&device)?;
        let registration = Registration::of(&device, self.pool.range())
            .inspect_err(
                |error| tracing::info!(%error, "the host buffer stays without registration"),
            )
            .ok();
        let buffer = (self.bytes > 0).then(|| DeviceBuffer::new(&device, self.bytes));
        let buffer = buffer.and_then(|buffer| match buffer {
            Ok((buffer, handle)) => {
                let offer = Offered {
                    uuid: device.uuid(),
                    bytes: self.bytes,
                    handle,
                };
                self.pool.offer_device(offer.into());
                Some(Arc::new(buffer))
            }
            Err(error) => {
                tracing::warn!(%error, bytes = self.bytes, "no device buffer; tensors of devices go through host memory");
                None
            }
        });
        Ok(Active {
            ordinal,
            device,
            side,
            buffer,
            registration,
        })
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "DeviceMemory({} bytes)", self.bytes)
    }
}
