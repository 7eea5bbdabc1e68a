//! The offloaded tensors of a rank, as those see them who keep them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shardwright_core::{MicrobatchId, StepEpoch};
use shardwright_system::Owner;
use shardwright_system::sync::{MutexGuard, thread};
use shardwright_wire::Buffer;

use crate::counts::Counts;
use crate::error::OffloadError;
use crate::file::StorageFile;
use crate::mover::{Kept, Shared, State, Stored, wait};
use crate::plan::{CallId, Task, TensorId};
use crate::pool::HostPool;
use crate::trace::Span;

/// How long an end waits for the transfer under way.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// How a rank offloads.
#[derive(Clone, Debug)]
pub struct Options {
    /// The rank, for messages.
    pub rank: u32,
    /// How many tasks ahead tensors come back.
    pub horizon: u32,
    /// In which directory the file is; without one tensors go to a pool of host memory.
    pub directory: Option<PathBuf>,
    /// How many bytes may be on their way out at once, still in memory: a forward waits where the disk is slower than it.
    pub most_outgoing: u64,
    /// How long the storage may move nothing while somebody waits.
    pub timeout: Duration,
}

/// What a frontend has to do with tensors of devices, since it last asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Those to be brought to host memory, and told of with [`Offload::arrived`].
    pub leaving: Vec<TensorId>,
    /// Those that nobody keeps any more.
    pub gone: Vec<TensorId>,
    /// Those that are needed within the horizon, to be brought back to the device as far as they are in host memory.
    pub near: Vec<TensorId>,
}

/// The offloaded tensors of a rank.
#[derive(Debug)]
pub struct Offload {
    shared: Arc<Shared>,
    owner: Owner,
}

impl Offload {
    /// Makes the storage, and starts the thread.
    pub fn start(options: Options) -> Result<Self, OffloadError> {
        let rank = options.rank;
        let made = options.directory.as_deref().map(|directory| {
            StorageFile::make_in(directory).map_err(|error| OffloadError::Directory {
                rank,
                what: "offloaded activations",
                directory: directory.to_owned(),
                reason: error.to_string(),
            })
        });
        let shared = Arc::new(Shared::new(options, made.transpose()?));
        let own = Arc::clone(&shared);
        thread::Builder::new()
            .name("shardwright-offload".to_owned())
            .spawn(move || own.run())
            .map_err(|error| OffloadError::NoThread {
                rank,
                reason: error.to_string(),
            })?;
        Ok(Self {
            shared,
            owner: Owner::this_process(),
        })
    }

    /// A step begins, of which the rank is expected to run these tasks. A failure of the last step is forgotten.
    pub fn begin_step(
        &self,
        step: StepEpoch,
        coming: impl IntoIterator<Item = Task>,
    ) -> Result<(), OffloadError> {
        let mut state = self.enter()?;
        state.step = step;
        state.error = None;
        state.plan.begin_step(coming);
        self.shared.obey(&mut state);
        Ok(())
    }

    /// The rank begins a task, or goes on with it.
    pub fn begin_task(&self, task: Task) -> Result<(), OffloadError> {
        let mut state = self.enter()?;
        state.plan.begin_task(task);
        self.shared.obey(&mut state);
        Ok(())
    }

    /// A call of a module is checkpointed.
    pub fn add_call(&self, microbatch: MicrobatchId, module: &str) -> Result<CallId, OffloadError> {
        let mut state = self.enter()?;
        let call = state.plan.add_call(microbatch);
        state.modules.insert(call, (module.into(), microbatch));
        Ok(call)
    }

    /// A call keeps these bytes. Waits while too many are on their way out.
    pub fn add_tensor(&self, call: CallId, bytes: Buffer) -> Result<TensorId, OffloadError> {
        let len = bytes.len() as u64;
        self.add(call, Some(bytes), len)
    }

    fn add(
        &self,
        call: CallId,
        memory: Option<Buffer>,
        bytes: u64,
    ) -> Result<TensorId, OffloadError> {
        let state = self.enter()?;
        let most = self.shared.options.most_outgoing;
        let mut state = self.wait_until(state, |state| state.outgoing <= most)?;
        let (module, microbatch) = state
            .modules
            .get(&call)
            .ok_or(OffloadError::Closed)?
            .clone();
        let tensor = state.plan.add_tensor(call);
        let kept = Kept {
            module,
            microbatch,
            bytes,
            of_device: memory.is_none(),
            memory,
            stored: None,
        };
        state.tensors.insert(tensor, kept);
        self.shared.obey(&mut state);
        Ok(tensor)
    }

    /// A call keeps a tensor of a device, which its frontend has until [`Changes::leaving`] names it.
    pub fn add_device_tensor(&self, call: CallId, bytes: u64) -> Result<TensorId, OffloadError> {
        self.add(call, None, bytes)
    }

    /// A tensor of a device that had to leave is in host memory.
    pub fn arrived(&self, tensor: TensorId, bytes: Buffer) -> Result<(), OffloadError> {
        let mut state = self.enter()?;
        if let Some(kept) = state.tensors.get_mut(&tensor) {
            kept.memory = Some(bytes);
            self.shared.store_later(&mut state, tensor);
        }
        Ok(())
    }

    /// What a frontend has to do with tensors of devices.
    pub fn changes(&self) -> Result<Changes, OffloadError> {
        let mut state = self.enter()?;
        let wanted = state.plan.wanted().into_iter();
        let near = wanted.filter(|tensor| state.tensors[tensor].of_device);
        let near = near.collect();
        Ok(Changes {
            leaving: std::mem::take(&mut state.leaving),
            gone: std::mem::take(&mut state.gone),
            near,
        })
    }

    /// The bytes of a tensor, where they are in host memory.
    pub fn bytes_of(&self, tensor: TensorId) -> Result<Option<Buffer>, OffloadError> {
        let state = self.enter()?;
        let found = state.tensors.get(&tensor).and_then(|kept| {
            let stored = match &kept.stored {
                Some(Stored::Pool(buffer)) => Some(buffer),
                _ => None,
            };
            kept.memory.as_ref().or(stored).cloned()
        });
        Ok(found)
    }

    /// The locked host memory of the rank.
    pub fn pool(&self) -> &Arc<HostPool> {
        &self.shared.pool
    }

    /// A call keeps a tensor that others keep; false where none does any more.
    pub fn share(&self, call: CallId, tensor: TensorId) -> Result<bool, OffloadError> {
        let mut state = self.enter()?;
        let shared = state.plan.share(call, tensor);
        self.shared.obey(&mut state);
        Ok(shared)
    }

    /// The tensors of a call that is computed again. Waits for those that are not back. Those of devices have no bytes here
    /// before they have come to host memory.
    pub fn take(&self, call: CallId) -> Result<Vec<(TensorId, Option<Buffer>)>, OffloadError> {
        let mut state = self.enter()?;
        state.plan.need(call);
        self.shared.obey(&mut state);
        state.counts.computed_again += 1;
        if !state.plan.is_ready(call) {
            let began = Instant::now();
            state = self.wait_until(state, |state| state.plan.is_ready(call))?;
            state.counts.waited += 1;
            state.counts.waited_ns += began.elapsed().as_nanos() as u64;
        }
        if let Some(error) = &state.error {
            return Err(error.clone());
        }
        let found = state.plan.tensors_of(call).iter().map(|tensor| {
            let kept = &state.tensors[tensor];
            debug_assert!(
                kept.of_device || kept.memory.is_some(),
                "what is ready is in memory"
            );
            (*tensor, kept.memory.clone())
        });
        let found = found.collect();
        state.plan.has_used(call);
        self.shared.obey(&mut state);
        Ok(found)
    }

    /// A call keeps nothing any more.
    pub fn remove_call(&self, call: CallId) {
        if let Ok(mut state) = self.enter() {
            state.plan.remove_call(call);
            state.modules.remove(&call);
            self.shared.obey(&mut state);
        }
    }

    /// What has been moved.
    pub fn counts(&self) -> Result<Counts, OffloadError> {
        let state = self.enter()?;
        Ok(Counts {
            on_the_way: state.under_way(),
            file_bytes: state.places.size,
            locked_bytes: self.shared.pool.bytes(),
            ..state.counts
        })
    }

    /// Whether what goes out stays in memory: in a pool, or in a file system without a disk.
    pub fn stays_in_memory(&self) -> bool {
        let file = self.shared.file.as_ref();
        file.is_none_or(StorageFile::is_in_memory)
    }

    /// Keeps spans from now on, or keeps none.
    pub fn keep_trace(&self, on: bool) {
        if let Ok(mut state) = self.enter() {
            state.spans.switch(on);
        }
    }

    /// The spans since the last call, oldest first, and how many more were overwritten.
    pub fn take_trace(&self) -> (Vec<Span>, u64) {
        self.enter()
            .map_or_else(|_| (Vec::new(), 0), |mut state| state.spans.take())
    }

    /// Ends the thread. What is kept is lost.
    pub fn close(&self) {
        let Ok(mut state) = self.enter() else {
            return;
        };
        state.closed = true;
        self.shared.work.notify_all();
        self.shared.done.notify_all();
        let until = Instant::now() + CLOSE_TIMEOUT;
        while !state.ended && Instant::now() < until {
            state = wait(&self.shared.done, state);
        }
    }

    /// In a forked child the thread is missing, and the lock may be held for ever.
    fn enter(&self) -> Result<MutexGuard<'_, State>, OffloadError> {
        self.owner.check()?;
        let state = self.shared.lock();
        if state.closed {
            return Err(OffloadError::Closed);
        }
        Ok(state)
    }

    /// Waits for transfers; the first failure ends every wait.
    fn wait_until<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        is_over: impl Fn(&State) -> bool,
    ) -> Result<MutexGuard<'a, State>, OffloadError> {
        let (mut moved, mut since) = (state.moved, Instant::now());
        loop {
            if let Some(error) = &state.error {
                return Err(error.clone());
            }
            if state.closed {
                return Err(OffloadError::Closed);
            }
            if is_over(&state) {
                return Ok(state);
            }
            if state.moved != moved {
                (moved, since) = (state.moved, Instant::now());
            } else if since.elapsed() >= self.shared.options.timeout {
                return Err(OffloadError::Silent {
                    rank: self.shared.options.rank,
                    seconds: since.elapsed().as_secs(),
                    storage: self.shared.storage_name(),
                });
            }
            state = wait(&self.shared.done, state);
        }
    }
}

impl Drop for Offload {
    fn drop(&mut self) {
        self.close();
    }
}
