//! What is where: which tensors go out, which come back, and when.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use shardwright_core::{MicrobatchId, Phase};

/// A tensor that checkpoints keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorId(pub u64);

/// A checkpointed call, which needs its tensors when it is computed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallId(pub u64);

/// A task of the rank, as a schedule has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task {
    /// Forward or backward.
    pub phase: Phase,
    /// Of which microbatch.
    pub microbatch: MicrobatchId,
}

/// What has to be done with a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Write it to the storage; it stays in memory meanwhile.
    Store(TensorId),
    /// Read it from the storage, where it stays.
    Load(TensorId),
    /// Let go of its memory: it is stored.
    Release(TensorId),
    /// Let go of all of it: nobody keeps it.
    Erase(TensorId),
}

/// Where a tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Where {
    /// In memory only.
    Memory,
    /// In memory, and on its way to the storage.
    GoingOut,
    /// In the storage only.
    Out,
    /// In the storage, and on its way to memory.
    ComingIn,
    /// In memory and in the storage.
    Both,
}

#[derive(Debug)]
struct Kept {
    place: Where,
    /// Who keeps it.
    calls: BTreeSet<CallId>,
    /// Whether the storage had no room for it: it is not asked again.
    refused: bool,
}

#[derive(Debug)]
struct Call {
    microbatch: MicrobatchId,
    tensors: Vec<TensorId>,
    /// Whether it needs its tensors now.
    needed: bool,
}

/// The state machine. Every method is an event; what has to be done afterwards is in [`Plan::take_orders`].
#[derive(Debug)]
pub struct Plan {
    horizon: usize,
    /// The tasks that the schedule has ahead, as far as it knows them.
    coming: VecDeque<Task>,
    current: Option<Task>,
    /// Of each microbatch the calls that have not been computed again, in the order of their forwards.
    pending: BTreeMap<MicrobatchId, Vec<CallId>>,
    calls: BTreeMap<CallId, Call>,
    /// Calls that the current task has computed again: they mostly keep nothing any more in a moment.
    used: BTreeSet<CallId>,
    tensors: BTreeMap<TensorId, Kept>,
    /// Those of [`Where::Memory`] and [`Where::Both`], which may have to leave.
    settled: BTreeSet<TensorId>,
    next: u64,
    orders: Vec<Order>,
}

impl Plan {
    /// A plan that brings tensors back this many tasks ahead.
    pub fn new(horizon: u32) -> Self {
        Self {
            horizon: horizon as usize,
            coming: VecDeque::new(),
            current: None,
            pending: BTreeMap::new(),
            calls: BTreeMap::new(),
            used: BTreeSet::new(),
            tensors: BTreeMap::new(),
            settled: BTreeSet::new(),
            next: 0,
            orders: Vec::new(),
        }
    }

    /// What has to be done, in order, since the last call.
    pub fn take_orders(&mut self) -> Vec<Order> {
        std::mem::take(&mut self.orders)
    }

    /// A step begins, of which these tasks are expected on the rank, in this order. Calls of earlier steps that are still
    /// kept are not expected to be computed again.
    pub fn begin_step(&mut self, coming: impl IntoIterator<Item = Task>) {
        self.coming = coming.into_iter().collect();
        self.current = None;
        self.pending.clear();
        self.used.clear();
        self.settle();
    }

    /// The rank begins a task, or goes on with it. Where that is another one than was expected next, those before it are
    /// still to come.
    pub fn begin_task(&mut self, task: Task) {
        if let Some(place) = self.coming.iter().position(|coming| *coming == task) {
            self.coming.remove(place);
        }
        if self.current.replace(task) != Some(task) {
            self.used.clear();
        }
        self.settle();
    }

    /// A checkpointed call of a microbatch begins.
    pub fn add_call(&mut self, microbatch: MicrobatchId) -> CallId {
        let call = CallId(self.number());
        let kept = Call {
            microbatch,
            tensors: Vec::new(),
            needed: false,
        };
        self.calls.insert(call, kept);
        self.pending.entry(microbatch).or_default().push(call);
        self.settle();
        call
    }

    /// A call keeps a tensor, which is in memory.
    pub fn add_tensor(&mut self, call: CallId) -> TensorId {
        let tensor = TensorId(self.number());
        let kept = Kept {
            place: Where::Memory,
            calls: BTreeSet::new(),
            refused: false,
        };
        self.tensors.insert(tensor, kept);
        self.settled.insert(tensor);
        self.share(call, tensor);
        tensor
    }

    /// A call keeps a tensor that others keep already; false where none does any more.
    pub fn share(&mut self, call: CallId, tensor: TensorId) -> bool {
        let (Some(keeper), Some(kept)) = (self.calls.get_mut(&call), self.tensors.get_mut(&tensor))
        else {
            return false;
        };
        if kept.calls.insert(call) {
            keeper.tensors.push(tensor);
        }
        self.settle();
        true
    }

    /// A call is computed again: it needs its tensors in memory until [`Plan::has_used`].
    pub fn need(&mut self, call: CallId) {
        if let Some(kept) = self.calls.get_mut(&call) {
            kept.needed = true;
            let microbatch = kept.microbatch;
            self.forget_pending(microbatch, call);
            self.settle();
        }
    }

    /// A call has taken its tensors. It may need them again, after another backward through the same graph; but what is
    /// not stored yet is not stored before another task begins.
    pub fn has_used(&mut self, call: CallId) {
        if let Some(kept) = self.calls.get_mut(&call) {
            kept.needed = false;
            self.used.insert(call);
            self.settle();
        }
    }

    /// A call keeps nothing any more: its graph is gone.
    pub fn remove_call(&mut self, call: CallId) {
        let Some(gone) = self.calls.remove(&call) else {
            return;
        };
        self.forget_pending(gone.microbatch, call);
        self.used.remove(&call);
        for tensor in gone.tensors {
            if let Some(kept) = self.tensors.get_mut(&tensor) {
                kept.calls.remove(&call);
                self.erase_unless_kept(tensor);
            }
        }
        self.settle();
    }

    /// What was asked for by [`Order::Store`] is done.
    pub fn stored(&mut self, tensor: TensorId) {
        self.arrive(tensor, Where::GoingOut, Where::Both);
    }

    /// The storage has not taken a tensor, which stays in memory.
    pub fn not_stored(&mut self, tensor: TensorId) {
        if let Some(kept) = self.tensors.get_mut(&tensor) {
            kept.refused = true;
        }
        self.arrive(tensor, Where::GoingOut, Where::Memory);
    }

    /// What was asked for by [`Order::Load`] is done.
    pub fn loaded(&mut self, tensor: TensorId) {
        self.arrive(tensor, Where::ComingIn, Where::Both);
    }

    /// A tensor could not be read; it is asked for again when it is next needed.
    pub fn not_loaded(&mut self, tensor: TensorId) {
        if let Some(kept) = self.tensors.get_mut(&tensor)
            && kept.place == Where::ComingIn
        {
            kept.place = Where::Out;
            self.erase_unless_kept(tensor);
        }
    }

    /// Whether all tensors of a call are in memory.
    pub fn is_ready(&self, call: CallId) -> bool {
        self.tensors_of(call)
            .iter()
            .all(|tensor| !matches!(self.tensors[tensor].place, Where::Out | Where::ComingIn))
    }

    /// The tensors that a call keeps.
    pub fn tensors_of(&self, call: CallId) -> &[TensorId] {
        self.calls.get(&call).map_or(&[], |kept| &kept.tensors)
    }

    /// Whether any call keeps a tensor.
    pub fn is_kept(&self, tensor: TensorId) -> bool {
        self.tensors
            .get(&tensor)
            .is_some_and(|kept| !kept.calls.is_empty())
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn forget_pending(&mut self, microbatch: MicrobatchId, call: CallId) {
        if let Some(calls) = self.pending.get_mut(&microbatch) {
            calls.retain(|own| *own != call);
            if calls.is_empty() {
                self.pending.remove(&microbatch);
            }
        }
    }

    fn arrive(&mut self, tensor: TensorId, from: Where, to: Where) {
        if let Some(kept) = self.tensors.get_mut(&tensor)
            && kept.place == from
        {
            kept.place = to;
            self.settled.insert(tensor);
            self.erase_unless_kept(tensor);
            self.settle();
        }
    }

    /// What is under way with it ends first.
    fn erase_unless_kept(&mut self, tensor: TensorId) {
        let kept = &self.tensors[&tensor];
        if kept.calls.is_empty() && !matches!(kept.place, Where::GoingOut | Where::ComingIn) {
            self.tensors.remove(&tensor);
            self.settled.remove(&tensor);
            self.orders.push(Order::Erase(tensor));
        }
    }

    /// The tensors that have to be in memory: those needed now, and those needed within the horizon. A forward that comes
    /// counts as one task, a second computation as one, and so does a backward that has none.
    pub fn wanted(&self) -> BTreeSet<TensorId> {
        let needed = self.calls.values().filter(|call| call.needed);
        let mut wanted: BTreeSet<_> = needed.flat_map(|call| call.tensors.clone()).collect();
        let mut left = self.horizon;
        let mut seen = BTreeSet::new();
        let current = self
            .current
            .into_iter()
            .filter(|task| task.phase == Phase::Backward);
        let known = current.map(|task| (task, true));
        let known = known.chain(self.coming.iter().map(|task| (*task, false)));
        // Beyond what is known, backwards come in the order of microbatches.
        let rest = self.pending.keys().map(|microbatch| {
            let phase = Phase::Backward;
            (
                Task {
                    phase,
                    microbatch: *microbatch,
                },
                true,
            )
        });
        for (task, has_begun) in known.chain(rest) {
            if left == 0 {
                break;
            }
            if task.phase == Phase::Forward {
                left -= 1;
                continue;
            }
            if !seen.insert(task.microbatch) {
                continue;
            }
            let Some(calls) = self.pending.get(&task.microbatch) else {
                left -= usize::from(!has_begun);
                continue;
            };
            for call in calls.iter().rev().take(left) {
                wanted.extend(&self.calls[call].tensors);
            }
            left = left.saturating_sub(calls.len());
        }
        wanted
    }

    fn settle(&mut self) {
        let wanted = self.wanted();
        for tensor in &wanted {
            if let Some(kept) = self.tensors.get_mut(tensor)
                && kept.place == Where::Out
            {
                kept.place = Where::ComingIn;
                self.orders.push(Order::Load(*tensor));
            }
        }
        let leaving: Vec<_> = self.settled.difference(&wanted).copied().collect();
        for tensor in leaving {
            let kept = self
                .tensors
                .get_mut(&tensor)
                .expect("settled tensors are kept");
            let (place, order) = match kept.place {
                Where::Both => (Where::Out, Order::Release(tensor)),
                _ if kept.refused || kept.calls.iter().any(|call| self.used.contains(call)) => {
                    continue;
                }
                _ => (Where::GoingOut, Order::Store(tensor)),
            };
            kept.place = place;
            self.settled.remove(&tensor);
            self.orders.push(order);
        }
    }
}
