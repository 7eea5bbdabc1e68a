//! The thread that moves tensors between memory and the storage, and what it shares with those who wait.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use shardwright_buffers::Block;
use shardwright_core::{MicrobatchId, StepEpoch};
use shardwright_system::sync::{Condvar, Mutex, MutexGuard};
use shardwright_wire::{Buffer, NoMemory};

use crate::counts::Counts;
use crate::error::{OffloadError, Subject};
use crate::file::{Places, StorageFile};
use crate::plan::{CallId, Order, Plan, TensorId};
use crate::pool::{HostPool, LeasedBlock};
use crate::shell::Options;
use crate::trace::{Direction, Span, Spans};

/// No wait is longer without a look at how things stand.
const SLICE: Duration = Duration::from_millis(200);

/// A tensor that is kept, wherever it is.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) module: Arc<str>,
    pub(crate) microbatch: MicrobatchId,
    pub(crate) bytes: u64,
    /// Whether it is a tensor of a device, which the frontend brings to host memory and back.
    pub(crate) of_device: bool,
    pub(crate) memory: Option<Buffer>,
    pub(crate) stored: Option<Stored>,
}

#[derive(Debug)]
pub(crate) enum Stored {
    Pool(Buffer),
    File(Block),
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) plan: Plan,
    pub(crate) tensors: BTreeMap<TensorId, Kept>,
    pub(crate) modules: BTreeMap<CallId, (Arc<str>, MicrobatchId)>,
    pub(crate) places: Places,
    /// What the thread has to do; what comes back goes first.
    pub(crate) loads: VecDeque<TensorId>,
    pub(crate) stores: VecDeque<TensorId>,
    pub(crate) outgoing: u64,
    /// Tensors of devices that have to come to host memory, and those that are gone, since the frontend last asked.
    pub(crate) leaving: Vec<TensorId>,
    pub(crate) gone: Vec<TensorId>,
    /// Whether the thread moves one that is in none of both.
    pub(crate) moving: bool,
    /// How many transfers have ended.
    pub(crate) moved: u64,
    pub(crate) step: StepEpoch,
    pub(crate) error: Option<OffloadError>,
    pub(crate) counts: Counts,
    pub(crate) spans: Spans,
    pub(crate) closed: bool,
    pub(crate) ended: bool,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) options: Options,
    pub(crate) file: Option<StorageFile>,
    pub(crate) pool: Arc<HostPool>,
    pub(crate) started: Instant,
    pub(crate) state: Mutex<State>,
    /// The thread has something to do.
    pub(crate) work: Condvar,
    /// A transfer has ended.
    pub(crate) done: Condvar,
}

impl State {
    fn new(horizon: u32) -> Self {
        Self {
            plan: Plan::new(horizon),
            tensors: BTreeMap::new(),
            modules: BTreeMap::new(),
            places: Places::new(),
            loads: VecDeque::new(),
            stores: VecDeque::new(),
            leaving: Vec::new(),
            gone: Vec::new(),
            outgoing: 0,
            moving: false,
            moved: 0,
            step: StepEpoch(0),
            error: None,
            counts: Counts::default(),
            spans: Spans::default(),
            closed: false,
            ended: false,
        }
    }
}

impl State {
    /// How many tensors are on their way, or wait for it.
    pub(crate) fn under_way(&self) -> u64 {
        (self.loads.len() + self.stores.len() + usize::from(self.moving)) as u64
    }
}

impl Shared {
    pub(crate) fn new(options: Options, file: Option<StorageFile>) -> Self {
        Self {
            state: Mutex::new(State::new(options.horizon)),
            options,
            file,
            pool: Arc::default(),
            started: Instant::now(),
            work: Condvar::new(),
            done: Condvar::new(),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn storage_name(&self) -> String {
        self.file.as_ref().map_or_else(
            || "host memory".to_owned(),
            |file| format!("a file in {}", file.directory.display()),
        )
    }

    /// Does what the plan asks for, or has the thread do it.
    pub(crate) fn obey(&self, state: &mut State) {
        for order in state.plan.take_orders() {
            match order {
                Order::Store(tensor) if state.tensors[&tensor].memory.is_none() => {
                    state.leaving.push(tensor);
                }
                Order::Store(tensor) => self.store_later(state, tensor),
                Order::Load(tensor) => {
                    state.loads.push_back(tensor);
                    self.work.notify_one();
                }
                Order::Release(tensor) => {
                    let kept = state.tensors.get_mut(&tensor);
                    kept.expect("the plan and the tensors agree").memory = None;
                }
                Order::Erase(tensor) => {
                    let gone = state.tensors.remove(&tensor);
                    let gone = gone.expect("the plan and the tensors agree");
                    if gone.of_device {
                        state.gone.push(tensor);
                    }
                    if let Some(stored) = gone.stored {
                        state.counts.bytes -= gone.bytes;
                        if let Stored::File(block) = stored {
                            state.places.give_back(block);
                        }
                    }
                }
            }
        }
    }

    /// Has the thread store what is in host memory.
    pub(crate) fn store_later(&self, state: &mut State, tensor: TensorId) {
        state.outgoing += state.tensors[&tensor].bytes;
        state.stores.push_back(tensor);
        self.work.notify_one();
    }

    /// The thread: one transfer after another.
    pub(crate) fn run(&self) {
        let mut state = self.lock();
        while !state.closed {
            state = if let Some(tensor) = state.loads.pop_front() {
                state.moving = true;
                self.load(state, tensor)
            } else if let Some(tensor) = state.stores.pop_front() {
                state.moving = true;
                self.store(state, tensor)
            } else {
                wait(&self.work, state)
            };
        }
        state.ended = true;
        self.done.notify_all();
    }

    fn store<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        tensor: TensorId,
    ) -> MutexGuard<'a, State> {
        let kept = &state.tensors[&tensor];
        let (bytes, memory) = (kept.bytes, kept.memory.clone());
        let memory = memory.expect("what goes out is in memory");
        let began = self.started.elapsed();
        let outcome = if !state.plan.is_kept(tensor) {
            None
        } else if let Some(file) = &self.file {
            let block = state.places.take(bytes).expect("no disk is as large");
            drop(state);
            let written = file.write(memory.as_bytes(), block.offset);
            state = self.lock();
            if written.is_err() {
                state.places.give_back(block);
            }
            Some(written.map(|()| Stored::File(block)).map_err(|error| {
                self.transfer_error(&state, tensor, ("write", block.offset), &error)
            }))
        } else {
            Some(Ok(Stored::Pool(memory)))
        };
        state.outgoing -= bytes;
        match outcome {
            None => state.plan.stored(tensor), // nobody keeps it, so that it is erased
            Some(Ok(stored)) => {
                self.record(&mut state, tensor, Direction::Out, began);
                state.counts.stored += 1;
                state.counts.stored_bytes += bytes;
                state.counts.bytes += bytes;
                state.counts.most_bytes = state.counts.most_bytes.max(state.counts.bytes);
                if let Some(kept) = state.tensors.get_mut(&tensor) {
                    kept.stored = Some(stored);
                }
                state.plan.stored(tensor);
            }
            Some(Err(error)) => {
                state.error.get_or_insert(error);
                state.plan.not_stored(tensor);
            }
        }
        self.has_moved(state)
    }

    fn load<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        tensor: TensorId,
    ) -> MutexGuard<'a, State> {
        let kept = &state.tensors[&tensor];
        let began = self.started.elapsed();
        let found = match (&kept.stored, &self.file) {
            (Some(Stored::Pool(buffer)), _) => Ok(buffer.clone()),
            (Some(Stored::File(block)), Some(file)) => {
                let (block, of_device) = (*block, kept.of_device);
                drop(state);
                let leased = of_device.then(|| self.pool.lease(block.len as usize));
                let found = read(file, block, leased.flatten());
                state = self.lock();
                found.map_err(|error| match error {
                    ReadError::NoMemory => OffloadError::NoMemory {
                        subject: self.subject(&state, tensor),
                    },
                    ReadError::Io(error) => {
                        self.transfer_error(&state, tensor, ("read", block.offset), &error)
                    }
                })
            }
            _ => unreachable!("what comes back is in the storage"),
        };
        match found {
            Ok(buffer) => {
                self.record(&mut state, tensor, Direction::In, began);
                state.counts.loaded += 1;
                state.counts.loaded_bytes += buffer.len() as u64;
                if let Some(kept) = state.tensors.get_mut(&tensor) {
                    kept.memory = Some(buffer);
                }
                state.plan.loaded(tensor);
            }
            Err(error) => {
                state.error.get_or_insert(error);
                state.plan.not_loaded(tensor);
            }
        }
        self.has_moved(state)
    }

    fn has_moved<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        state.moving = false;
        state.moved += 1;
        self.obey(&mut state);
        self.done.notify_all();
        state
    }

    fn subject(&self, state: &State, tensor: TensorId) -> Subject {
        let kept = &state.tensors[&tensor];
        Subject {
            rank: self.options.rank,
            module: kept.module.to_string(),
            microbatch: kept.microbatch,
            bytes: kept.bytes,
        }
    }

    fn transfer_error(
        &self,
        state: &State,
        tensor: TensorId,
        (what, offset): (&'static str, u64),
        error: &std::io::Error,
    ) -> OffloadError {
        OffloadError::Transfer {
            subject: self.subject(state, tensor),
            what,
            directory: self.options.directory.clone().unwrap_or_default(),
            offset,
            reason: error.to_string(),
        }
    }

    fn record(&self, state: &mut State, tensor: TensorId, direction: Direction, start: Duration) {
        let (step, end) = (state.step, self.started.elapsed());
        let kept = &state.tensors[&tensor];
        state.spans.push(|| Span {
            step,
            direction,
            microbatch: kept.microbatch,
            module: kept.module.to_string(),
            bytes: kept.bytes,
            start,
            end,
        });
    }
}

enum ReadError {
    NoMemory,
    Io(std::io::Error),
}

impl From<NoMemory> for ReadError {
    fn from(_: NoMemory) -> Self {
        Self::NoMemory
    }
}

/// Reads into locked memory, where there is some.
fn read(
    file: &StorageFile,
    block: Block,
    leased: Option<LeasedBlock>,
) -> Result<Buffer, ReadError> {
    if let Some(mut leased) = leased {
        let read = file.read(leased.as_bytes_mut(), block.offset);
        return read.map(|()| leased.into_buffer()).map_err(ReadError::Io);
    }
    Buffer::filled_by(block.len as usize, |bytes| {
        file.read(bytes, block.offset).map_err(ReadError::Io)
    })
}

/// Waits for a slice at most.
pub(crate) fn wait<'a>(condvar: &Condvar, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
    let waited = condvar.wait_timeout(state, SLICE);
    waited.unwrap_or_else(PoisonError::into_inner).0
}
