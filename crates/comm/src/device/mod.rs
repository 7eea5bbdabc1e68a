//! A transport whose messages wait for their tensors' devices, in order.

#[cfg(test)]
mod contract;
mod process;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use shardwright_core::Rank;
use shardwright_cuda::{Bounds, DeviceMemory, DeviceTensor, Job, Refused, Retained, pause};
use shardwright_system::Owner;
use shardwright_wire::{ErrorReport, Message};

use crate::error::CommError;
use crate::exchange::Exchange;
use crate::job::{JobOptions, TensorMemory};
use crate::layers::{Layer, Met, Prepared};
use crate::start_error::StartError;
use crate::transport::{
    CommStats, HeartbeatState, Loss, Observation, PeerInfo, Receiver, Transport,
};
use crate::{BACKLOG_DEADLINE, QUEUE_CAPACITY};

/// How long the end of a connection waits for devices.
const CLOSE_DEADLINE: Duration = Duration::from_secs(2);

/// How long the thread sleeps while there is nothing to do.
const IDLE: Duration = Duration::from_mins(1);

/// How often it looks for peers that have begun to use their devices, and for how long after this rank has; from then on
/// it does when something comes from one.
const LOOK_FOR_PEERS: Duration = Duration::from_millis(100);
const LOOKING: Duration = Duration::from_secs(30);

/// Of the messages of a rank that wait for a device.
const BOUNDS: Bounds = Bounds {
    capacity: QUEUE_CAPACITY,
    timeout: BACKLOG_DEADLINE,
};

/// The order of messages with tensors of a device among the transports.
pub(crate) struct DeviceLayer;

/// The same before the ranks have met.
struct Ready {
    memory: Arc<DeviceMemory>,
    receiver: Arc<dyn Receiver>,
}

/// A transport, before which messages with tensors of a device wait until these are there (CU-1).
struct Ordered {
    inner: Arc<dyn Transport>,
    memory: Arc<DeviceMemory>,
    exchange: Arc<Exchange>,
    owner: Owner,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The thread's own.
struct Queue {
    inner: Arc<dyn Transport>,
    receiver: Arc<dyn Receiver>,
    exchange: Arc<Exchange>,
    memory: Arc<DeviceMemory>,
    messages: BTreeMap<Rank, VecDeque<Message>>,
    kept: Vec<Retained>,
    closing: Option<Instant>,
    /// Whether all peers' buffers were tried to open, and since when this rank uses its device.
    knows_peers: bool,
    active_since: Option<Instant>,
    /// When something came or was done last.
    changed: Instant,
}

impl Layer for DeviceLayer {
    fn name(&self) -> &'static str {
        "device"
    }

    fn prepare(
        &self,
        _: &JobOptions,
        memory: &TensorMemory,
        receiver: &Arc<dyn Receiver>,
    ) -> Result<Option<Box<dyn Prepared>>, StartError> {
        Ok(memory.device.as_ref().map(|memory| {
            Box::new(Ready {
                memory: Arc::clone(memory),
                receiver: Arc::clone(receiver),
            }) as _
        }))
    }
}

impl Prepared for Ready {
    fn join(self: Box<Self>, met: Met) -> Result<Arc<dyn Transport>, StartError> {
        let Self { memory, receiver } = *self;
        let Met {
            below, exchange, ..
        } = met;
        if !memory.inbox().claim() {
            return Err(system("it serves another connection"));
        }
        let queue = Queue {
            inner: Arc::clone(&below),
            receiver,
            exchange: Arc::clone(&exchange),
            memory: Arc::clone(&memory),
            messages: BTreeMap::new(),
            kept: Vec::new(),
            closing: None,
            knows_peers: false,
            active_since: None,
            changed: Instant::now(),
        };
        let thread = std::thread::Builder::new()
            .name("sw-device".to_owned())
            .spawn(move || queue.run())
            .map_err(|error| system(&error))?;
        Ok(Arc::new(Ordered {
            inner: below,
            memory,
            exchange,
            owner: Owner::this_process(),
            thread: Mutex::new(Some(thread)),
        }))
    }
}

impl Ordered {
    /// The message, if it may leave at once: it has no tensors of a device, and none that has waits before it.
    fn queue(&self, to: Rank, message: Message) -> Result<Option<Message>, CommError> {
        self.owner.check()?;
        let tensors = message.body().map_or(&[][..], |body| &body.tensors);
        let waits = tensors
            .iter()
            .any(|part| DeviceTensor::of(&part.data).is_some());
        if self.inner.peer(to).is_none() {
            return Ok(Some(message));
        }
        let passed = self.memory.inbox().pass(to, message, waits, BOUNDS);
        passed.map_err(|refused| match refused {
            Refused::Closed => CommError::Closed,
            Refused::Full(queued) => CommError::Backlog {
                rank: to,
                queued,
                waited: BOUNDS.timeout,
            },
        })
    }
}

fn system(reason: &(impl ToString + ?Sized)) -> StartError {
    StartError::System {
        what: "cannot start the thread of the device",
        reason: reason.to_string(),
    }
}

impl Queue {
    fn run(mut self) {
        self.memory.inbox().serve();
        loop {
            for job in self.memory.inbox().take(self.sleep()) {
                self.take(job);
            }
            self.look_for_peers();
            let before = self.len();
            self.release();
            self.send_ready();
            if self.len() < before {
                self.changed = Instant::now();
            }
            if let Some(deadline) = self.closing
                && (self.is_idle() || Instant::now() > deadline)
            {
                break;
            }
        }
        for job in self.memory.inbox().end() {
            self.take(job);
        }
        self.release();
        if !self.kept.is_empty() {
            let pieces = self.kept.len();
            tracing::warn!(pieces, "memory that a device still uses is never freed");
        }
        // Better lost than written to by a device (CU-2).
        std::mem::forget(self.kept);
        for (rank, messages) in self.messages {
            if !messages.is_empty() {
                let messages = messages.len();
                tracing::warn!(%rank, messages, "messages whose tensors were not there in time are not sent");
            }
        }
    }

    fn sleep(&self) -> Duration {
        let is_looking = |since: Instant| !self.knows_peers && since.elapsed() < LOOKING;
        match self.active_since {
            _ if !self.is_idle() => pause(self.changed.elapsed()),
            Some(since) if is_looking(since) => LOOK_FOR_PEERS,
            _ => IDLE,
        }
    }

    /// Opens the device buffers of peers that offer one by now.
    fn look_for_peers(&mut self) {
        if self.knows_peers || self.closing.is_some() || !self.memory.is_active() {
            return;
        }
        self.active_since.get_or_insert_with(Instant::now);
        self.knows_peers = true;
        for (rank, peer) in self.exchange.peers() {
            self.knows_peers &= self.memory.try_to_open(rank, peer);
        }
    }

    /// How much waits for a device.
    fn len(&self) -> usize {
        self.kept.len() + self.messages.values().map(VecDeque::len).sum::<usize>()
    }

    fn is_idle(&self) -> bool {
        self.len() == 0
    }

    fn take(&mut self, job: Job) {
        self.changed = Instant::now();
        match job {
            Job::Send(to, message) => self.messages.entry(to).or_default().push_back(message),
            Job::Keep(kept) => self.kept.push(kept),
            Job::Look => {}
            Job::Close => {
                let deadline = || Instant::now() + CLOSE_DEADLINE;
                self.closing.get_or_insert_with(deadline);
            }
        }
    }

    /// Drops what was kept until an event that is done.
    fn release(&mut self) {
        for index in (0..self.kept.len()).rev() {
            match self.kept[index].0.is_done() {
                Ok(false) => {}
                Ok(true) => drop(self.kept.swap_remove(index)),
                Err(error) => {
                    tracing::debug!(%error, "memory stays with a device that has failed");
                    std::mem::forget(self.kept.swap_remove(index).1);
                }
            }
        }
    }

    /// Sends from the front of each rank's queue what is ready.
    fn send_ready(&mut self) {
        for (to, messages) in &mut self.messages {
            while let Some(message) = messages.front() {
                let outcome = match prepared(message, &self.exchange, *to) {
                    Ok(true) => {
                        let message = messages.pop_front().expect("it was looked at");
                        match self.inner.send(*to, message) {
                            // The receiver hears of it by the loss itself.
                            Ok(()) | Err(CommError::PeerLost { .. } | CommError::Closed) => Ok(()),
                            Err(error) => Err(error.to_string()),
                        }
                    }
                    Ok(false) => break,
                    Err(error) => {
                        messages.pop_front();
                        Err(error)
                    }
                };
                self.memory.inbox().has_left(*to);
                if let Err(error) = outcome {
                    let reason = format!(
                        "a message with tensors of a device could not be sent to it: {error}"
                    );
                    self.receiver.peer_lost(*to, Loss::Broken { reason });
                }
            }
        }
    }
}

/// Whether all tensors of a message are there, and on the host where that is needed.
fn prepared(message: &Message, exchange: &Exchange, to: Rank) -> Result<bool, String> {
    let tensors = message.body().map_or(&[][..], |body| &body.tensors);
    let tensors: Vec<_> = tensors
        .iter()
        .filter_map(|part| DeviceTensor::of(&part.data))
        .collect();
    for tensor in &tensors {
        if !tensor.is_ready().map_err(|error| error.to_string())? {
            return Ok(false);
        }
    }
    for tensor in &tensors {
        if !exchange.copies_from(to, tensor) {
            tensor.on_host_now().map_err(|error| error.to_string())?;
        }
    }
    Ok(true)
}

impl Transport for Ordered {
    fn rank(&self) -> Rank {
        self.inner.rank()
    }

    fn world(&self) -> u32 {
        self.inner.world()
    }

    fn send(&self, to: Rank, message: Message) -> Result<(), CommError> {
        match self.queue(to, message)? {
            Some(message) => self.inner.send(to, message),
            None => Ok(()),
        }
    }

    fn send_and_read(&self, to: Rank, message: Message) -> Result<(), CommError> {
        match self.queue(to, message)? {
            Some(message) => self.inner.send_and_read(to, message),
            None => Ok(()),
        }
    }

    fn check(&self, to: Rank) -> Result<(), CommError> {
        self.inner.check(to)
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
        if !self.owner.is_here() {
            return;
        }
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread {
            self.memory.close(CLOSE_DEADLINE);
            if self.memory.inbox().push(Job::Close).is_err() {
                tracing::debug!("the thread of the device has ended before");
            }
            if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
                tracing::error!(rank = %self.rank(), "the thread of the device panicked");
            }
        }
        // Which closes what is open here of peers' devices, and has them close what they have open of this one's.
        self.inner.close(report);
        self.memory.await_closed(|rank| {
            let peer = self.inner.peer(rank);
            peer.is_none_or(|peer| process::has_ended(peer.pid))
        });
    }

    fn reached_by(&self, rank: Rank) -> Cow<'static, str> {
        self.inner.reached_by(rank)
    }

    fn devices(&self, rank: Rank) -> Cow<'static, str> {
        self.exchange.describe_devices(rank).into()
    }

    fn stats(&self) -> CommStats {
        self.inner.stats()
    }
}

impl Drop for Ordered {
    fn drop(&mut self) {
        self.close(None);
    }
}
