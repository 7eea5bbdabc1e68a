//! Streams and events.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::capture::{Captures, Mode};
use crate::{CallFailure, INVALID_HANDLE, LAUNCH_FAILED, NOT_READY, Undefined};

/// The stream that exists without being created.
const DEFAULT_STREAM: u64 = 0;

/// The first handle; far from what a test might make up.
const FIRST_HANDLE: u64 = 0x1000;

/// What a stream does.
#[derive(Clone, Copy, Debug)]
enum Operation {
    Copy { to: u64, from: u64, bytes: usize },
    Reach { event: u64, time: u64 },
}

/// How often an event was recorded, and up to which of them it has been reached.
#[derive(Clone, Copy, Debug, Default)]
struct Recorded {
    recorded: u64,
    reached: u64,
}

/// A device's streams; each runs in a thread of its own, which [`DeviceStreams::run`] is for.
pub(crate) struct DeviceStreams {
    state: Mutex<State>,
    /// A stream has done all that it had.
    done: Condvar,
    delay: Duration,
}

/// What a stream has to do. It is woken alone: of threads that all wake for each operation, most would only be in the way of the one.
#[derive(Default)]
struct Stream {
    queue: VecDeque<Operation>,
    given: Arc<Condvar>,
}

struct State {
    streams: BTreeMap<u64, Stream>,
    events: BTreeMap<u64, Recorded>,
    captures: Captures,
    /// Streams that do not run for now.
    stopped: BTreeSet<u64>,
    next_handle: u64,
    copies_left: Option<u64>,
}

impl DeviceStreams {
    /// A device that waits so long before each copy, and fails after so many.
    pub(crate) const fn new(delay: Duration, copies: Option<u64>) -> Self {
        Self {
            state: Mutex::new(State {
                streams: BTreeMap::new(),
                events: BTreeMap::new(),
                captures: Captures::new(),
                stopped: BTreeSet::new(),
                next_handle: FIRST_HANDLE,
                copies_left: copies,
            }),
            done: Condvar::new(),
            delay,
        }
    }

    /// A stream; its thread is the caller's to start.
    pub(crate) fn create_stream(&self) -> u64 {
        let mut state = self.lock();
        let stream = state.handle();
        state.streams.insert(stream, Stream::default());
        stream
    }

    /// Whether the default stream has no thread yet.
    pub(crate) fn claims_default_stream(&self) -> bool {
        let mut state = self.lock();
        let new = !state.streams.contains_key(&DEFAULT_STREAM);
        state.streams.entry(DEFAULT_STREAM).or_default();
        new
    }

    pub(crate) fn destroy_stream(&self, stream: u64) -> Result<(), i32> {
        let mut state = self.lock();
        // What is queued still runs, as it does on a device.
        while state
            .streams
            .get(&stream)
            .is_some_and(|left| !left.queue.is_empty())
        {
            state = wait(&self.done, state);
        }
        let stream = state.streams.remove(&stream).ok_or(INVALID_HANDLE)?;
        stream.given.notify_all();
        Ok(())
    }

    pub(crate) fn create_event(&self) -> u64 {
        let mut state = self.lock();
        let event = state.handle();
        state.events.insert(event, Recorded::default());
        event
    }

    pub(crate) fn destroy_event(&self, event: u64) -> Result<(), i32> {
        let known = self.lock().events.remove(&event).is_some();
        known.then_some(()).ok_or(INVALID_HANDLE)
    }

    pub(crate) fn record(&self, event: u64, stream: u64) -> Result<(), i32> {
        let mut state = self.lock();
        let recorded = state.events.get_mut(&event).ok_or(INVALID_HANDLE)?;
        recorded.recorded += 1;
        let time = recorded.recorded;
        Self::queue(state, stream, Operation::Reach { event, time })
    }

    /// An error while the event has not been reached, or when the device has failed.
    pub(crate) fn query(&self, event: u64) -> Result<(), i32> {
        let state = self.lock();
        let recorded = state.events.get(&event).ok_or(INVALID_HANDLE)?;
        if state.copies_left == Some(0) {
            return Err(LAUNCH_FAILED);
        }
        (recorded.reached >= recorded.recorded)
            .then_some(())
            .ok_or(NOT_READY)
    }

    pub(crate) fn copy(&self, to: u64, from: u64, bytes: usize, stream: u64) -> Result<(), i32> {
        let mut state = self.lock();
        match &mut state.copies_left {
            None => {}
            Some(0) => return Err(LAUNCH_FAILED),
            Some(left) => *left -= 1,
        }
        Self::queue(state, stream, Operation::Copy { to, from, bytes })
    }

    /// Whether a call may be made that could spoil a capture, by a thread that is held to `mode`.
    pub(crate) fn unsafe_call(&self, mode: Mode) -> Result<(), i32> {
        self.lock()
            .captures
            .unsafe_call(mode, std::thread::current().id())
    }

    pub(crate) fn begin_capture(&self, stream: u64, mode: Mode) -> Result<(), i32> {
        let mut state = self.lock();
        state
            .captures
            .begin(stream, mode, std::thread::current().id())
    }

    pub(crate) fn end_capture(&self, stream: u64) -> Result<(), i32> {
        self.lock().captures.end(stream)
    }

    pub(crate) fn is_capturing(&self, stream: u64) -> bool {
        self.lock().captures.has(stream)
    }

    /// Memory is about to go, which no copy may be using.
    pub(crate) fn goes(&self, start: u64, bytes: usize) -> Result<(), CallFailure> {
        let state = self.lock();
        let end = start + bytes as u64;
        let touches = |from: u64, bytes: usize| from < end && start < from + bytes as u64;
        let used = state
            .streams
            .values()
            .flat_map(|stream| &stream.queue)
            .any(|operation| match *operation {
                Operation::Copy { to, from, bytes } => touches(to, bytes) || touches(from, bytes),
                Operation::Reach { .. } => false,
            });
        if used {
            return Err(CallFailure::Undefined(Undefined::GoneUnderACopy));
        }
        Ok(())
    }

    /// Lets a stream stand, or run again.
    pub(crate) fn stop(&self, stream: u64, stops: bool) {
        let mut state = self.lock();
        if stops {
            state.stopped.insert(stream);
        } else {
            state.stopped.remove(&stream);
        }
        if let Some(stream) = state.streams.get(&stream) {
            stream.given.notify_all();
        }
    }

    /// How many streams and events there are.
    pub(crate) fn len(&self) -> usize {
        let state = self.lock();
        state
            .streams
            .keys()
            .filter(|stream| **stream != DEFAULT_STREAM)
            .count()
            + state.events.len()
    }

    fn queue(
        mut state: MutexGuard<'_, State>,
        stream: u64,
        operation: Operation,
    ) -> Result<(), i32> {
        let captured = state.captures.has(stream);
        let stream = state.streams.get_mut(&stream).ok_or(INVALID_HANDLE)?;
        if !captured {
            stream.queue.push_back(operation); // else it is a part of the graph, and does not run
            stream.given.notify_all();
        }
        Ok(())
    }

    /// Does what a stream is given, until it is destroyed; `copy` moves bytes.
    pub(crate) fn run(&self, stream: u64, copy: impl Fn(u64, u64, usize)) {
        let mut state = self.lock();
        while let Some(Stream { queue, given }) = state.streams.get(&stream) {
            let runs = !state.stopped.contains(&stream);
            match queue.front().copied().filter(|_| runs) {
                None => {
                    let given = Arc::clone(given);
                    state = wait(&given, state);
                    continue;
                }
                Some(Operation::Copy { to, from, bytes }) => {
                    drop(state);
                    std::thread::sleep(self.delay);
                    copy(to, from, bytes);
                    state = self.lock();
                }
                Some(Operation::Reach { event, time }) => {
                    if let Some(recorded) = state.events.get_mut(&event) {
                        recorded.reached = time;
                    }
                }
            }
            if let Some(Stream { queue, .. }) = state.streams.get_mut(&stream) {
                queue.pop_front();
                if queue.is_empty() {
                    self.done.notify_all();
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn wait<'a>(changed: &Condvar, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
    let woken = changed.wait_timeout(state, Duration::from_secs(1));
    woken.unwrap_or_else(PoisonError::into_inner).0
}

impl State {
    fn handle(&mut self) -> u64 {
        self.next_handle += 1;
        self.next_handle
    }
}
