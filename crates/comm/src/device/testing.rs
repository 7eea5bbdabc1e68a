//! Jobs with a rehearsed device, which all ranks of a test share.

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use shardwright_core::Rank;
use shardwright_wire::{Buffer, ErrorReport, Message};

use shardwright_cuda::{DeviceMemory, Rehearsal};

use super::DeviceLayer;
use crate::error::CommError;
use crate::job::JobOptions;
use crate::layers::Stack;
use crate::transport::{CommStats, HeartbeatState, Observation, PeerInfo, Receiver, Transport};

/// The only device, and its default stream.
pub(crate) const ORDINAL: i32 = 0;
/// The stream that there always is.
pub(crate) const STREAM: u64 = 0;

/// The stand-in, beside the library.
pub(super) fn rehearsal() -> Rehearsal {
    Rehearsal::load(library().as_os_str())
}

/// The stand-in for the driver, which cargo builds beside the tests.
fn library() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    tests.with_file_name("libshardwright_cuda_rehearsal.so")
}

/// A rank whose tensors all are in device memory when they are sent.
pub(crate) struct FromDevice {
    inner: Arc<dyn Transport>,
    pub(crate) memory: Arc<DeviceMemory>,
}

/// Gives a rank a device with a buffer of so many bytes.
pub(crate) fn configure(options: &mut JobOptions, bytes: u64) {
    options.comm.cuda_library = Some(library());
    options.comm.device_buffer_bytes = bytes;
}

/// Joins in a thread, with the device of the options.
pub(crate) fn join(
    options: JobOptions,
    receiver: Arc<dyn Receiver>,
) -> JoinHandle<Arc<FromDevice>> {
    let name = format!("test-device-{}", options.rank);
    let thread = std::thread::Builder::new().name(name);
    thread
        .spawn(move || {
            let stack = Stack::of(&[&DeviceLayer], options, receiver).unwrap();
            let memory = stack.memory().device().map(Arc::clone).unwrap();
            let inner = stack.join(&mut || true).unwrap();
            Arc::new(FromDevice { inner, memory })
        })
        .unwrap()
}

impl FromDevice {
    fn moved(&self, mut message: Message) -> Message {
        let tensors = message
            .body_mut()
            .map_or(&mut [][..], |body| &mut body.tensors);
        for tensor in tensors {
            if let Some(moved) = self.on_device(tensor.data.as_bytes()) {
                tensor.data = moved;
            }
        }
        message
    }

    /// Sends a message whose tensors are where they are to be.
    pub(crate) fn send_as_it_is(&self, to: Rank, message: Message) -> Result<(), CommError> {
        self.inner.send(to, message)
    }

    /// Bytes as a tensor of the device. Its memory is never freed, and so there when the copy comes to it.
    pub(crate) fn on_device(&self, bytes: &[u8]) -> Option<Buffer> {
        let source: &'static [u8] = Vec::leak(bytes.to_vec());
        let address = source.as_ptr().expose_provenance() as u64;
        self.memory
            .send_from(ORDINAL, address, bytes.len(), STREAM)
            .unwrap()
    }
}

impl Transport for FromDevice {
    fn rank(&self) -> Rank {
        self.inner.rank()
    }

    fn world(&self) -> u32 {
        self.inner.world()
    }

    fn send(&self, to: Rank, message: Message) -> Result<(), CommError> {
        self.inner.send(to, self.moved(message))
    }

    fn send_and_read(&self, to: Rank, message: Message) -> Result<(), CommError> {
        self.inner.send_and_read(to, self.moved(message))
    }

    fn peer(&self, rank: Rank) -> Option<&PeerInfo> {
        self.inner.peer(rank)
    }

    fn heartbeat_state(&self) -> &Arc<HeartbeatState> {
        self.inner.heartbeat_state()
    }

    fn read_until(&self, slice: Duration, look: &mut dyn FnMut() -> Observation) -> bool {
        self.inner.read_until(slice, look)
    }

    fn wake_reader(&self) {
        self.inner.wake_reader();
    }

    fn close(&self, report: Option<ErrorReport>) {
        self.inner.close(report);
    }

    fn reached_by(&self, rank: Rank) -> Cow<'static, str> {
        self.inner.reached_by(rank)
    }

    fn devices(&self, rank: Rank) -> Cow<'static, str> {
        self.inner.devices(rank)
    }

    fn stats(&self) -> CommStats {
        self.inner.stats()
    }
}
