//! OF-1 to OF-5 under any events, with transfers that end whenever they like, and may fail.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use shardwright_core::{MicrobatchId, Phase};

use crate::plan::{CallId, Order, Plan, Task, TensorId};

#[derive(Clone, Debug)]
enum Event {
    BeginStep(Vec<(bool, u32)>),
    BeginTask(bool, u32),
    AddCall(u32),
    AddTensor(usize),
    Share(usize, usize),
    Need(usize),
    HasUsed(usize),
    RemoveCall(usize),
    /// The transfer at this place of those under way ends, well or not.
    End(usize, bool),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let task = || (any::<bool>(), 0..4_u32);
    let event = prop_oneof![
        1 => prop::collection::vec(task(), 0..8).prop_map(Event::BeginStep),
        4 => task().prop_map(|(forward, microbatch)| Event::BeginTask(forward, microbatch)),
        4 => (0..4_u32).prop_map(Event::AddCall),
        6 => any::<usize>().prop_map(Event::AddTensor),
        2 => any::<(usize, usize)>().prop_map(|(call, tensor)| Event::Share(call, tensor)),
        4 => any::<usize>().prop_map(Event::Need),
        3 => any::<usize>().prop_map(Event::HasUsed),
        3 => any::<usize>().prop_map(Event::RemoveCall),
        9 => (any::<usize>(), prop::bool::weighted(0.9)).prop_map(|(place, well)| Event::End(place, well)),
    ];
    prop::collection::vec(event, 0..120)
}

fn task((forward, microbatch): (bool, u32)) -> Task {
    Task {
        phase: if forward {
            Phase::Forward
        } else {
            Phase::Backward
        },
        microbatch: MicrobatchId(microbatch),
    }
}

/// What is really where, and who really keeps what.
#[derive(Default)]
struct World {
    memory: BTreeSet<TensorId>,
    storage: BTreeSet<TensorId>,
    under_way: Vec<Order>,
    refused: BTreeSet<TensorId>,
    calls: BTreeMap<CallId, BTreeSet<TensorId>>,
    needed: BTreeSet<CallId>,
    used: BTreeSet<CallId>,
    /// By microbatch, the newest last.
    pending: BTreeMap<u32, Vec<CallId>>,
    coming: Vec<Task>,
    current: Option<Task>,
}

impl World {
    fn call(&self, index: usize) -> Option<CallId> {
        let calls: Vec<_> = self.calls.keys().copied().collect();
        (!calls.is_empty()).then(|| calls[index % calls.len()])
    }

    fn kept(&self) -> BTreeSet<TensorId> {
        self.calls.values().flatten().copied().collect()
    }

    fn obey(&mut self, orders: Vec<Order>) -> Result<(), TestCaseError> {
        for order in orders {
            match order {
                Order::Store(tensor) => {
                    prop_assert!(self.memory.contains(&tensor));
                    prop_assert!(!self.storage.contains(&tensor), "OF-5");
                    prop_assert!(!self.refused.contains(&tensor));
                    self.under_way.push(order);
                }
                Order::Load(tensor) => {
                    prop_assert!(self.storage.contains(&tensor));
                    prop_assert!(!self.memory.contains(&tensor), "OF-5");
                    self.under_way.push(order);
                }
                Order::Release(tensor) => {
                    prop_assert!(self.storage.contains(&tensor), "OF-1");
                    prop_assert!(self.memory.remove(&tensor));
                }
                Order::Erase(tensor) => {
                    prop_assert!(!self.kept().contains(&tensor), "OF-1");
                    self.memory.remove(&tensor);
                    self.storage.remove(&tensor);
                }
            }
        }
        Ok(())
    }

    fn forget_pending(&mut self, call: CallId) {
        for calls in self.pending.values_mut() {
            calls.retain(|own| *own != call);
        }
    }

    /// The tensors of the second computations that come within a horizon, told in another way than the plan does.
    fn ahead(&self, horizon: usize) -> BTreeSet<TensorId> {
        let mut places: Vec<Option<CallId>> = Vec::new();
        let mut seen = BTreeSet::new();
        let mut tasks: Vec<(Task, usize)> = self.current.iter().map(|task| (*task, 0)).collect();
        tasks.extend(self.coming.iter().map(|task| (*task, 1)));
        for number in 0..4 {
            tasks.push((task((false, number)), 0));
        }
        for (task, cost) in tasks {
            if task.phase == Phase::Forward {
                places.extend(vec![None; cost]);
            } else if seen.insert(task.microbatch) {
                match self.pending.get(&task.microbatch.0) {
                    Some(calls) if !calls.is_empty() => {
                        places.extend(calls.iter().rev().map(|call| Some(*call)));
                    }
                    _ => places.extend(vec![None; cost]),
                }
            }
        }
        places.truncate(horizon);
        let calls = places.into_iter().flatten();
        calls
            .flat_map(|call| self.calls[&call].iter().copied())
            .collect()
    }

    fn check(&self, plan: &Plan, horizon: usize) -> Result<(), TestCaseError> {
        let kept = self.kept();
        let needed: BTreeSet<_> = self
            .needed
            .iter()
            .flat_map(|call| self.calls[call].iter().copied())
            .collect();
        let wanted: BTreeSet<_> = self.ahead(horizon).union(&needed).copied().collect();
        let going = |order: fn(TensorId) -> Order, tensor| self.under_way.contains(&order(tensor));
        for tensor in &kept {
            let (inside, outside) = (self.memory.contains(tensor), self.storage.contains(tensor));
            prop_assert!(inside || outside, "OF-1");
            if wanted.contains(tensor) {
                prop_assert!(inside || going(Order::Load, *tensor), "OF-2");
            } else if !self.refused.contains(tensor) {
                let used = self
                    .used
                    .iter()
                    .any(|call| self.calls[call].contains(tensor));
                prop_assert!(
                    used || outside || going(Order::Store, *tensor),
                    "OF-3: {tensor:?}"
                );
                prop_assert!(!(inside && outside), "OF-3: {tensor:?}");
            }
        }
        for tensor in self.memory.union(&self.storage) {
            let moves = going(Order::Store, *tensor) || going(Order::Load, *tensor);
            prop_assert!(kept.contains(tensor) || moves, "OF-4");
        }
        for (call, tensors) in &self.calls {
            let ready = tensors.iter().all(|tensor| self.memory.contains(tensor));
            prop_assert_eq!(plan.is_ready(*call), ready);
        }
        Ok(())
    }
}

proptest! {
    #[test]
    fn tensors_are_where_they_have_to_be(horizon in 1..9_u32, events in events()) {
        let (mut plan, mut world) = (Plan::new(horizon), World::default());
        for event in events {
            match event {
                Event::BeginStep(coming) => {
                    world.coming = coming.into_iter().map(task).collect();
                    (world.current, world.pending) = (None, BTreeMap::new());
                    world.used.clear();
                    plan.begin_step(world.coming.clone());
                }
                Event::BeginTask(forward, microbatch) => {
                    let begun = task((forward, microbatch));
                    if let Some(place) = world.coming.iter().position(|own| *own == begun) {
                        world.coming.remove(place);
                    }
                    if world.current.replace(begun) != Some(begun) {
                        world.used.clear();
                    }
                    plan.begin_task(begun);
                }
                Event::AddCall(microbatch) => {
                    let call = plan.add_call(MicrobatchId(microbatch));
                    world.calls.insert(call, BTreeSet::new());
                    world.pending.entry(microbatch).or_default().push(call);
                }
                Event::AddTensor(index) => {
                    let Some(call) = world.call(index) else { continue };
                    let tensor = plan.add_tensor(call);
                    world.memory.insert(tensor);
                    world.calls.entry(call).or_default().insert(tensor);
                }
                Event::Share(call, tensor) => {
                    let Some(call) = world.call(call) else { continue };
                    let kept: Vec<_> = world.kept().into_iter().collect();
                    if kept.is_empty() { continue; }
                    let tensor = kept[tensor % kept.len()];
                    prop_assert!(plan.share(call, tensor));
                    world.calls.entry(call).or_default().insert(tensor);
                }
                Event::Need(index) => {
                    let Some(call) = world.call(index) else { continue };
                    world.needed.insert(call);
                    world.forget_pending(call);
                    plan.need(call);
                }
                Event::HasUsed(index) => {
                    let Some(call) = world.call(index) else { continue };
                    world.needed.remove(&call);
                    world.used.insert(call);
                    plan.has_used(call);
                }
                Event::RemoveCall(index) => {
                    let Some(call) = world.call(index) else { continue };
                    world.needed.remove(&call);
                    world.used.remove(&call);
                    world.forget_pending(call);
                    world.calls.remove(&call);
                    plan.remove_call(call);
                }
                Event::End(place, well) => {
                    if world.under_way.is_empty() { continue; }
                    let ended = world.under_way.remove(place % world.under_way.len());
                    match (ended, well) {
                        (Order::Store(tensor), true) => {
                            world.storage.insert(tensor);
                            plan.stored(tensor);
                        }
                        (Order::Store(tensor), false) => {
                            world.refused.insert(tensor);
                            plan.not_stored(tensor);
                        }
                        (Order::Load(tensor), true) => {
                            world.memory.insert(tensor);
                            plan.loaded(tensor);
                        }
                        // It is read again at the next event: a disk that fails is not asked without end.
                        (Order::Load(tensor), false) => {
                            plan.not_loaded(tensor);
                            world.obey(plan.take_orders())?;
                            continue;
                        }
                        _ => unreachable!("only these are under way"),
                    }
                }
            }
            world.obey(plan.take_orders())?;
            world.check(&plan, horizon as usize)?;
        }
    }
}
