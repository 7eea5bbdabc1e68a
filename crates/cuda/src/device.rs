//! A device in use, the host memory that is locked for it, and waiting for it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use shardwright_wire::{Buffer, NoMemory};

use super::buffer::DeviceBuffer;
use super::error::CudaError;
use super::pace::pause;
use super::raw::{CudaEvent, Device, Stream};
use shardwright_buffers::{Pool, Zone};

/// How often a wait for a copy is told of.
#[cfg(not(feature = "testing"))]
const REPORT: Duration = Duration::from_secs(30);
#[cfg(feature = "testing")]
const REPORT: Duration = Duration::from_millis(20);

/// Host memory is locked for the device in pieces of this size, or of a tensor's where that is larger.
pub(super) const ZONE_BYTES: usize = 32 << 20;

/// The most host memory that a rank locks in place. Tensors that find no room in it go through torch's own.
pub(super) const LOCKED_BYTES: usize = 256 << 20;

/// A device in use.
pub(super) struct Active {
    pub(super) ordinal: i32,
    pub(super) device: Arc<Device>,
    /// For copies that need not wait for torch's own.
    pub(super) side: Stream,
    /// `None` when device-to-device transfers are disabled, or the device had no room.
    pub(super) buffer: Option<Arc<DeviceBuffer>>,
    pub(super) locked: Locked,
}

/// Parts of the host buffer that are locked in place, so that copies run without the processor: none before a tensor
/// needs them. What a peer has locked is not locked here again, and what is read from it goes through the driver's own
/// memory: so what a host locks grows with its ranks, not with their pairs.
#[derive(Default)]
pub(super) struct Locked(Mutex<Vec<Arc<Zone>>>);

/// Host memory that is locked in place for a device, until no part of it is left: a copy that never came to its end may
/// still use one, which is kept for ever (CU-2).
struct Registration {
    device: Arc<Device>,
    start: usize,
}

/// Device memory could not be copied to the host.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StageError {
    /// The driver refused, or the device has failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The host has no room.
    #[error(transparent)]
    NoMemory(#[from] NoMemory),
    /// The connection was closed meanwhile.
    #[error("the device is not in use any more")]
    Gone,
}

impl Locked {
    /// How many bytes are locked.
    pub(super) fn bytes(&self) -> u64 {
        let zones = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        zones.iter().map(|zone| zone.range().1 as u64).sum()
    }

    /// Locked memory of the host buffer; `None` where there is no room, or the driver locks none.
    pub(super) fn reserve(
        &self,
        pool: &Arc<Pool>,
        device: &Arc<Device>,
        bytes: usize,
    ) -> Option<Buffer> {
        let mut zones = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let look = |zones: &[Arc<Zone>]| zones.iter().find_map(|zone| zone.reserve(bytes));
        if let Some(found) = look(&zones) {
            return Some(found);
        }
        // Blocks of zones come back as all others do.
        pool.take_back(usize::MAX);
        if let Some(found) = look(&zones) {
            return Some(found);
        }
        let locked: usize = zones.iter().map(|zone| zone.range().1).sum();
        let wanted = bytes.max(ZONE_BYTES);
        if locked + wanted > LOCKED_BYTES {
            return None;
        }
        let zone = Zone::of(pool, wanted).or_else(|| Zone::of(pool, bytes))?;
        let (start, length) = zone.range();
        match device.register(start, length) {
            Ok(()) => {
                zone.bind(Registration {
                    device: Arc::clone(device),
                    start: start.expose_provenance(),
                });
                zones.push(zone);
            }
            Err(error) => {
                tracing::warn!(%error, bytes = length, "no host memory can be locked for a device; its tensors go through torch's own");
                return None;
            }
        }
        look(&zones)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Err(error) = self.device.unregister(self.start) {
            tracing::debug!(%error, "host memory was not registered any more");
        }
    }
}

/// Waits until an event is done. A slow queue is waited for as long as the connection is open, and told of; a device
/// that has failed is an error at once.
pub(super) fn wait(event: &CudaEvent, go_on: impl Fn() -> bool) -> Result<(), StageError> {
    let began = Instant::now();
    let mut reports = 0;
    while !event.is_done()? {
        if !go_on() {
            return Err(StageError::Gone);
        }
        if began.elapsed() > REPORT * (reports + 1) {
            reports += 1;
            let seconds = began.elapsed().as_secs();
            tracing::warn!(
                seconds,
                "a tensor waits for its device, which has not failed and is busy with what was queued before"
            );
        }
        std::thread::sleep(pause(began.elapsed()));
    }
    Ok(())
}
