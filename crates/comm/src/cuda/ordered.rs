//! A transport whose messages wait for their tensors' devices, in order.

use std::any::Any;
use std::borrow::Cow;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver as Outlet, RecvTimeoutError, TrySendError};
use shardwright_core::Rank;
use shardwright_wire::{ErrorReport, Message};

use super::device::LOOK_AGAIN;
use super::memory::{DeviceMemory, Job};
use super::raw::Event;
use super::tensor::DeviceTensor;
use crate::error::CommError;
use crate::owner::Owner;
use crate::start_error::StartError;
use crate::transport::{CommStats, Loss, PeerInfo, Pulse, Receiver, Sight, Transport};
use crate::{BACKLOG_DEADLINE, Exchange, QUEUE_CAPACITY};

/// How long the end of a connection waits for devices.
const CLOSE_DEADLINE: Duration = Duration::from_secs(2);

/// How long a sender sleeps for which there is no room.
const FULL: Duration = Duration::from_millis(5);

/// How long the thread sleeps while there is nothing to do.
const IDLE: Duration = Duration::from_mins(1);

/// A transport, before which messages with tensors of a device wait until these are there (CU-1).
pub struct Ordered {
    inner: Arc<dyn Transport>,
    memory: Arc<DeviceMemory>,
    waiting: Arc<Waiting>,
    owner: Owner,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// How many messages wait for each rank.
#[derive(Default)]
struct Waiting {
    by_rank: Mutex<BTreeMap<Rank, usize>>,
    closed: AtomicBool,
    left: Condvar,
}

/// The thread's own.
struct Queue {
    inner: Arc<dyn Transport>,
    receiver: Arc<dyn Receiver>,
    exchange: Arc<Exchange>,
    memory: Arc<DeviceMemory>,
    waiting: Arc<Waiting>,
    messages: BTreeMap<Rank, VecDeque<Message>>,
    kept: Vec<(Event, Box<dyn Any + Send>)>,
    closing: Option<Instant>,
}

impl Ordered {
    /// Puts the thread before a transport, where there is a device to wait for; `receiver` hears of messages that
    /// cannot leave.
    pub fn before(
        inner: Arc<dyn Transport>,
        receiver: Arc<dyn Receiver>,
        exchange: Arc<Exchange>,
    ) -> Result<Arc<dyn Transport>, StartError> {
        let Some(memory) = exchange.device().map(Arc::clone) else {
            return Ok(inner);
        };
        let outlet = memory.outlet();
        let outlet = outlet.ok_or_else(|| system("it serves another connection"))?;
        let waiting = Arc::new(Waiting::default());
        let queue = Queue {
            inner: Arc::clone(&inner),
            receiver,
            exchange,
            memory: Arc::clone(&memory),
            waiting: Arc::clone(&waiting),
            messages: BTreeMap::new(),
            kept: Vec::new(),
            closing: None,
        };
        let thread = std::thread::Builder::new()
            .name("sw-device".to_owned())
            .spawn(move || queue.run(&outlet))
            .map_err(|error| system(&error))?;
        Ok(Arc::new(Self {
            inner,
            memory,
            waiting,
            owner: Owner::this_process(),
            thread: Mutex::new(Some(thread)),
        }))
    }

    /// The message, if it may leave at once: it has no tensors of a device, and none that has waits before it.
    fn queue(&self, to: Rank, message: Message) -> Result<Option<Message>, CommError> {
        self.owner.check()?;
        let tensors = message.body().map_or(&[][..], |body| &body.tensors);
        let waits = tensors
            .iter()
            .any(|part| DeviceTensor::of(&part.data).is_some());
        let known = self.inner.peer(to).is_some();
        let mut by_rank = self.waiting.lock();
        if !known || (!waits && by_rank.get(&to).is_none_or(|count| *count == 0)) {
            return Ok(Some(message));
        }
        let deadline = Instant::now() + BACKLOG_DEADLINE;
        let mut job = Job::Send(to, message);
        loop {
            if self.waiting.closed.load(Ordering::SeqCst) {
                return Err(CommError::Closed);
            }
            let count = by_rank.entry(to).or_default();
            if *count < QUEUE_CAPACITY {
                // Under the lock, so that two threads' messages for one rank cannot change places.
                match self.memory.inbox().try_send(job) {
                    Ok(()) => {
                        *count += 1;
                        return Ok(None);
                    }
                    Err(TrySendError::Disconnected(_)) => return Err(CommError::Closed),
                    Err(TrySendError::Full(refused)) => job = refused,
                }
            }
            if Instant::now() > deadline {
                return Err(CommError::Backlog {
                    rank: to,
                    queued: *count,
                    waited: BACKLOG_DEADLINE,
                });
            }
            let woken = self.waiting.left.wait_timeout(by_rank, FULL);
            by_rank = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

fn system(reason: &(impl ToString + ?Sized)) -> StartError {
    StartError::System {
        what: "cannot start the thread of the device",
        reason: reason.to_string(),
    }
}

impl Waiting {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Rank, usize>> {
        self.by_rank.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_left(&self, to: Rank) {
        if let Some(count) = self.lock().get_mut(&to) {
            *count -= 1;
        }
        self.left.notify_all();
    }
}

impl Queue {
    fn run(mut self, outlet: &Outlet<Job>) {
        loop {
            let sleep = if self.is_idle() { IDLE } else { LOOK_AGAIN };
            match outlet.recv_timeout(sleep) {
                Ok(job) => self.take(job),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => self.take(Job::Close),
            }
            while let Ok(job) = outlet.try_recv() {
                self.take(job);
            }
            self.let_go();
            self.send_ready();
            if let Some(deadline) = self.closing
                && (self.is_idle() || Instant::now() > deadline)
            {
                break;
            }
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

    fn is_idle(&self) -> bool {
        self.kept.is_empty() && self.messages.values().all(VecDeque::is_empty)
    }

    fn take(&mut self, job: Job) {
        match job {
            Job::Send(to, message) => self.messages.entry(to).or_default().push_back(message),
            Job::Keep(done, kept) => self.kept.push((done, kept)),
            Job::Register(import) => self.memory.register_now(&import),
            Job::Open(import) => self.memory.open_now(&import),
            Job::Close => {
                let deadline = || Instant::now() + CLOSE_DEADLINE;
                self.closing.get_or_insert_with(deadline);
            }
        }
    }

    /// Drops what was kept until an event that is done.
    fn let_go(&mut self) {
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
                self.waiting.has_left(*to);
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

    fn peer(&self, rank: Rank) -> Option<&PeerInfo> {
        self.inner.peer(rank)
    }

    fn pulse(&self) -> &Pulse {
        self.inner.pulse()
    }

    fn read_until(&self, slice: Duration, look: &mut dyn FnMut() -> Sight) -> bool {
        self.inner.read_until(slice, look)
    }

    fn wake_reader(&self) {
        self.inner.wake_reader();
    }

    fn close(&self, farewell: Option<ErrorReport>) {
        if !self.owner.is_here() {
            return;
        }
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread {
            // Under the lock: the message of whoever has found it open is in the inbox before the end is.
            let senders = self.waiting.lock();
            self.waiting.closed.store(true, Ordering::SeqCst);
            drop(senders);
            if self.memory.inbox().send(Job::Close).is_err() {
                tracing::debug!("the thread of the device has ended before");
            }
            if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
                tracing::error!(rank = %self.rank(), "the thread of the device panicked");
            }
        }
        self.inner.close(farewell);
    }

    fn reached_by(&self, rank: Rank) -> Cow<'static, str> {
        self.inner.reached_by(rank)
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
