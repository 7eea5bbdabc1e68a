//! A device in use, and how long to wait for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use shardwright_wire::NoMemory;

use super::buffer::DeviceBuffer;
use super::error::CudaError;
use super::raw::{Device, Event, Stream};

/// How long a thread may wait for a copy that is all that it waits for.
pub(super) const COPY_DEADLINE: Duration = Duration::from_secs(30);

/// How long a thread that waits for a device sleeps between two looks.
pub(super) const LOOK_AGAIN: Duration = Duration::from_micros(50);

/// A device in use.
pub(super) struct Active {
    pub(super) ordinal: i32,
    pub(super) device: Arc<Device>,
    /// For copies that need not wait for torch's own.
    pub(super) side: Stream,
    /// `None` when device-to-device transfers are disabled, or the device had no room.
    pub(super) buffer: Option<Arc<DeviceBuffer>>,
    pub(super) registration: Option<Registration>,
}

/// Host memory that is locked in place for a device.
pub(super) struct Registration {
    pub(super) device: Arc<Device>,
    pub(super) start: usize,
}

/// Device memory could not be copied to the host.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum StageError {
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    NoMemory(#[from] NoMemory),
    #[error("a copy from the device took longer than {} s", COPY_DEADLINE.as_secs())]
    Slow,
    #[error("the device is not in use any more")]
    Gone,
}

impl Active {
    /// Queues a copy; the event behind it.
    pub(super) fn copy(
        &self,
        to: u64,
        from: u64,
        bytes: usize,
        stream: u64,
    ) -> Result<Event, CudaError> {
        self.device.copy(to, from, bytes, stream)?;
        Event::behind(&self.device, stream)
    }
}

impl Registration {
    pub(super) fn of(
        device: &Arc<Device>,
        (start, bytes): (*mut u8, usize),
    ) -> Result<Self, CudaError> {
        device.register(start, bytes)?;
        Ok(Self {
            device: Arc::clone(device),
            start: start.expose_provenance(),
        })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Err(error) = self.device.unregister(self.start) {
            tracing::debug!(%error, "host memory was not registered any more");
        }
    }
}

/// Whether an event is done within a time.
pub(super) fn wait(event: &Event, limit: Duration) -> Result<bool, CudaError> {
    let deadline = Instant::now() + limit;
    while !event.is_done()? {
        if Instant::now() > deadline {
            return Ok(false);
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    Ok(true)
}
