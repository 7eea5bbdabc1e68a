//! What a rank has of its device: a persistent buffer, and the copies out of it and into it.

use std::any::Any;
use std::ffi::OsStr;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use shardwright_core::Rank;
use shardwright_wire::{Buffer, SharedMemory, SharedPlace};

use super::buffer::{DeviceBlock, DeviceBuffer, Offered, Opened, PeerDevice};
use super::device::{Active, Locked, StageError, wait};
use super::error::CudaError;
use super::job_queue::{Job, JobQueue};
use super::raw::{CudaEvent, Device, Driver, Stream};
use super::tensor::{DeviceTensor, ReceivedTensor};
use shardwright_buffers::{ImportError, Pool, SHARED_BYTES};
use shardwright_system::Owner;

/// How long the end of a connection waits for peers to close this rank's device buffer.
#[cfg(not(feature = "testing"))]
const CLOSED_DEADLINE: Duration = Duration::from_secs(5);
#[cfg(feature = "testing")]
const CLOSED_DEADLINE: Duration = Duration::from_millis(500);

/// How often it looks.
const CLOSED_SLICE: Duration = Duration::from_millis(1);

/// A rank's device, from the first tensor on that is sent from it or received there.
pub struct DeviceMemory {
    driver: Arc<Driver>,
    // Before the pool, a part of whose memory it has locked.
    active: OnceLock<Option<Active>>,
    pool: Arc<Pool>,
    bytes: u64,
    owner: Owner,
    inbox: JobQueue,
    /// From when on nobody waits for the device any more: the connection is being closed.
    deadline: OnceLock<Instant>,
}

/// A stream is being captured into a graph. What a graph does happens when it is launched, and a message cannot be part
/// of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a tensor of a GPU cannot cross ranks while its stream is captured into a CUDA graph: capture what lies between \
     messages, inside one module"
)]
pub struct Capturing;

impl DeviceMemory {
    /// Loads the driver from a path, or by its name. `bytes` is the size of the device buffer; 0 for none. Blocks are
    /// given back, and tensors staged, by way of the host's buffer.
    pub fn load(library: &OsStr, pool: Arc<Pool>, bytes: u64) -> Result<Arc<Self>, String> {
        let driver = Driver::load(library)?;
        Ok(Arc::new(Self {
            driver,
            pool,
            bytes,
            owner: Owner::this_process(),
            active: OnceLock::new(),
            inbox: JobQueue::default(),
            deadline: OnceLock::new(),
        }))
    }

    /// Begins to use a device, as the first tensor would.
    pub fn activate_now(&self, ordinal: i32) {
        if self.active(ordinal).is_none() {
            tracing::debug!(ordinal, "the device is not used");
        }
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
    ) -> Result<Option<Buffer>, Capturing> {
        let Some(active) = self.active(ordinal).filter(|_| bytes > 0) else {
            return Ok(None);
        };
        if active.device.is_capturing(stream) {
            return Err(Capturing);
        }
        // A small one travels inside its message.
        let block = (bytes >= SHARED_BYTES).then(|| self.device_block(active, bytes));
        let tensor = if let Some(block) = block.flatten() {
            let ready = active.device.copy(block.address(), address, bytes, stream);
            ready.map(|ready| DeviceTensor::on_device(self, block, bytes, ready))
        } else {
            // A copy to memory that is not locked would wait for the device.
            let staged = active.locked.reserve(&self.pool, &active.device, bytes);
            let Some((staged, to)) = staged.and_then(with_address) else {
                return Ok(None);
            };
            let ready = active.device.copy(to, address, bytes, stream);
            ready.map(|ready| DeviceTensor::on_host(self, staged, bytes, ready))
        };
        match tensor {
            Ok(tensor) => Ok(Some(Buffer::lent(Arc::new(tensor)))),
            Err(error) => {
                tracing::warn!(%error, "a tensor of a device goes through torch's own memory");
                Ok(None)
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
    ) -> Result<bool, Capturing> {
        if data.is_empty() {
            return Ok(true);
        }
        let Some(active) = self.active(ordinal) else {
            return Ok(false);
        };
        if active.device.is_capturing(stream) {
            return Err(Capturing);
        }
        let received = data.as_lent().and_then(|lent| {
            let lent: &dyn Any = &**lent;
            lent.downcast_ref::<ReceivedTensor>()
        });
        let from = match received {
            Some(received) => Ok(received.address()),
            None => data
                .prepare()
                .map(|()| data.as_bytes().as_ptr().expose_provenance() as u64),
        };
        let copied = from.and_then(|from| {
            let done = active.device.copy(address, from, data.len(), stream);
            done.map_err(|error| error.to_string())
        });
        match copied {
            Ok(done) => {
                self.keep(done, Box::new(data.clone()));
                Ok(true)
            }
            Err(error) => {
                tracing::warn!(%error, "a received tensor goes through torch's own memory");
                Ok(false)
            }
        }
    }

    /// A tensor that a peer's message names, in its device buffer.
    pub fn receive(
        self: &Arc<Self>,
        peer: &PeerDevice,
        place: SharedPlace,
        bytes: usize,
    ) -> Result<Buffer, ImportError> {
        let opened = peer.opened();
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
        let held = peer.import.take(place, bytes)?;
        let tensor = ReceivedTensor::new(self, opened, address, bytes, held);
        Ok(Buffer::lent(Arc::new(tensor)))
    }

    /// Whether this rank has used its device.
    pub fn is_active(&self) -> bool {
        self.active.get().is_some_and(Option::is_some)
    }

    /// The bytes of the device buffer, and those of host memory that are locked for the device; 0 before it is used.
    pub fn held_bytes(&self) -> (u64, u64) {
        let active = self.active.get().and_then(Option::as_ref);
        active.map_or((0, 0), |active| {
            let buffer = active.buffer.as_ref().map_or(0, |_| self.bytes);
            (buffer, active.locked.bytes())
        })
    }

    /// Has a peer's buffer opened, where it was not there when the thread looked; asked for each tensor.
    pub fn open(&self, peer: &PeerDevice) {
        if self.is_active()
            && !peer.is_tried()
            && peer.import.device_offer().is_some()
            && self.inbox.push(Job::Look).is_err()
        {
            tracing::debug!("a peer's device buffer stays closed, as the connection is");
        }
    }

    /// Tries to open a peer's device buffer, once, as soon as it offers one; whether that is over.
    pub fn try_to_open(&self, rank: Rank, peer: &PeerDevice) -> bool {
        let Some(Some(active)) = self.active.get() else {
            return false;
        };
        if self.bytes == 0 || peer.is_tried() {
            return true;
        }
        let Some(offer) = peer.import.device_offer() else {
            return false;
        };
        if !peer.try_once() {
            return true;
        }
        let Some(in_use) = peer.import.opens_device() else {
            return true; // it is leaving
        };
        let opened = Opened::open(&active.device, &Offered::from(offer), in_use);
        if let Err(error) = &opened {
            tracing::warn!(peer = %rank, %error, "the device memory of a rank of this host cannot be opened; tensors between both devices go through host memory");
        }
        peer.set(opened.map_err(|error| error.to_string()));
        true
    }

    /// Lends a tensor to a rank that has opened the device buffer, which only reads it (CU-6): so others may hold it
    /// too, and it may be lent to several; `None` when it is not there, or too many blocks are lent.
    pub fn lend(&self, tensor: &Arc<DeviceTensor>) -> Option<SharedPlace> {
        let offset = tensor.offset().filter(|_| self.owner.is_here())?;
        let kept: Arc<dyn Any + Send + Sync> = Arc::clone(tensor) as _;
        self.pool.lend_block(SharedMemory::Device, offset, kept)
    }

    /// Whether there may be transfers from device to device at all.
    pub fn is_enabled(&self) -> bool {
        self.bytes > 0
    }

    /// Keeps something until an event is done (CU-2).
    pub(super) fn keep(&self, done: CudaEvent, kept: Box<dyn Any + Send>) {
        if let Err(Job::Keep((done, kept))) = self.inbox.push(Job::Keep((done, kept)))
            && !done.is_done().unwrap_or(false)
        {
            // Better lost than written to by a device.
            std::mem::forget(kept);
        }
    }

    /// Copies device memory to the host, and waits for it; what it reads has to be there already.
    pub(super) fn stage(&self, address: u64, bytes: usize) -> Result<Buffer, StageError> {
        let active = self.active.get().and_then(Option::as_ref);
        let active = active.ok_or(StageError::Gone)?;
        let copy = |to: u64| active.device.copy(to, address, bytes, active.side.handle());
        let staged = active.locked.reserve(&self.pool, &active.device, bytes);
        let staged = staged.or_else(|| self.pool.reserve(bytes));
        let Some((staged, to)) = staged.and_then(with_address) else {
            return Buffer::filled_by(bytes, |into| {
                let done = copy(into.as_mut_ptr().expose_provenance() as u64)?;
                // To the end, also of a connection: it is the caller's memory. The driver returns from a copy to memory
                // that is not locked when it is done, so this takes no time.
                wait(&done, || true)
            });
        };
        let done = copy(to)?;
        match self.wait(&done) {
            Ok(()) => Ok(staged),
            Err(error) => {
                self.keep(done, Box::new(staged));
                Err(error)
            }
        }
    }

    /// Waits until an event is done, which a slow device may take long for.
    pub(super) fn wait(&self, event: &CudaEvent) -> Result<(), StageError> {
        wait(event, || {
            let until = self.deadline.get();
            until.is_none_or(|until| Instant::now() < *until)
        })
    }

    /// What its thread has to do.
    pub fn inbox(&self) -> &JobQueue {
        &self.inbox
    }

    /// No message is taken any more, no peer opens this rank's device memory, and nobody waits for the device for longer
    /// than this.
    pub fn close(&self, timeout: Duration) {
        self.deadline.get_or_init(|| Instant::now() + timeout);
        self.inbox.close();
        self.pool.withdraw_device();
    }

    /// Waits until no peer has this rank's device memory open (CU-8); those have not whose process is gone.
    pub fn await_closed(&self, is_gone: impl Fn(Rank) -> bool) {
        let deadline = Instant::now() + CLOSED_DEADLINE;
        loop {
            let users = self.pool.device_users();
            for rank in users.iter().filter(|rank| is_gone(**rank)) {
                self.pool.forget_device_user(*rank);
            }
            if users.is_empty() || Instant::now() > deadline {
                return;
            }
            std::thread::sleep(CLOSED_SLICE);
        }
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
        let mut is_new = false;
        let active = self.active.get_or_init(|| match self.activate(ordinal) {
            Ok(active) => {
                is_new = true;
                Some(active)
            }
            Err(error) => {
                tracing::warn!(%error, "tensors of devices go through torch's own host memory");
                None
            }
        });
        if is_new {
            // The peers' buffers are opened by the thread, which has to find the device in use.
            drop(self.inbox.push(Job::Look));
        }
        active.as_ref().filter(|active| active.ordinal == ordinal)
    }

    fn activate(&self, ordinal: i32) -> Result<Active, CudaError> {
        let device = Device::open(&self.driver, ordinal)?;
        let side = Stream::new(&device)?;
        let buffer = (self.bytes > 0).then(|| DeviceBuffer::new(&device, self.bytes, &self.pool));
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
            locked: Locked::default(),
        })
    }
}

/// Lent memory, and where it begins, for a device to write there.
fn with_address(buffer: Buffer) -> Option<(Buffer, u64)> {
    let address = buffer.as_lent()?.start().expose_provenance() as u64;
    Some((buffer, address))
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "DeviceMemory({} bytes)", self.bytes)
    }
}
