//! Following a program: which ready item is which of its actions, and what may run now.
//!
//! See `docs/design/schedules.md`. A rank stands at one action of its list. What the list names later is held back,
//! what it has behind it or does not name at all runs freely.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::num::NonZeroU32;

use shardwright_core::{MicrobatchId, PipelineRank, RequestId};
use shardwright_schedule::{
    Part, Program, Progress, RankOrder, Ready, ReadyKind, Schedule, StagePart,
};
use shardwright_wire::{Request, Work, WorkKind};

use super::requests::About;
use super::serving::RequestKey;

/// What a rank does with a ready item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// The program does not name it, or has it behind it.
    Free,
    /// It is what comes next.
    Next,
    /// It comes later.
    Held(StagePart),
}

/// A forward that this rank serves.
#[derive(Clone, Copy, Debug)]
struct Call {
    stage: usize,
    /// Whether its backward, or the word that there is none, has not been run.
    is_open: bool,
}

/// How far the step function of a microbatch is.
#[derive(Debug, Default)]
struct RootTask {
    /// How many modules of other ranks it has called forward.
    num_calls: usize,
    /// The calls that wait for their backward, with their number.
    calls: BTreeMap<RequestId, usize>,
    in_backward: bool,
    has_returned: bool,
}

impl RootTask {
    /// How many calls there were before what it runs backward now.
    fn calls_before(&self) -> usize {
        self.calls.values().max().map_or(0, |number| number + 1)
    }
}

/// How far a rank is in its part of a program.
#[derive(Debug)]
pub(super) struct Order {
    list: RankOrder,
    position: usize,
    /// Of a rank other than the root, whose part in the model is its step function.
    calls: BTreeMap<MicrobatchId, BTreeMap<RequestKey, Call>>,
    /// For each backward request the forward that it is of.
    forwards: BTreeMap<RequestKey, RequestKey>,
    is_root: bool,
    root_tasks: BTreeMap<MicrobatchId, RootTask>,
    weights: BTreeMap<u64, Option<StagePart>>,
    /// Units of the root that have been granted.
    granted: BTreeSet<StagePart>,
}

impl Order {
    pub(super) fn new(program: &Program, rank: PipelineRank) -> Self {
        Self {
            list: RankOrder::new(program, rank),
            position: 0,
            calls: BTreeMap::new(),
            forwards: BTreeMap::new(),
            is_root: rank == PipelineRank(0),
            root_tasks: BTreeMap::new(),
            weights: BTreeMap::new(),
            granted: BTreeSet::new(),
        }
    }

    /// The rank's part of the program.
    pub(super) fn units(&self) -> &[StagePart] {
        self.list.units()
    }

    /// A request that this rank will serve has arrived: the k-th forward of a microbatch is the rank's k-th stage, and
    /// what comes after its last stage belongs to that one.
    pub(super) fn asked_here(&mut self, request: &Request) {
        let stages = self.list.num_stages();
        if matches!(request.work, Work::Forward(_)) && stages > 0 && !self.is_root {
            let calls = self.calls.entry(request.microbatch).or_default();
            let call = Call {
                stage: calls.len().min(stages - 1),
                is_open: true,
            };
            calls.insert((request.requester, request.id), call);
        }
    }

    /// No gradient will come back to a forward that this rank serves.
    pub(super) fn ends_with_forward(&mut self, microbatch: MicrobatchId, key: RequestKey) {
        let calls = self.calls.get_mut(&microbatch);
        if let Some(call) = calls.and_then(|calls| calls.get_mut(&key)) {
            call.is_open = false;
        }
    }

    /// The step function of a microbatch asks another rank for something.
    pub(super) fn root_asks(&mut self, id: RequestId, about: &About, microbatch: MicrobatchId) {
        let task = self.root_tasks.entry(microbatch).or_default();
        if about.kind == WorkKind::Forward {
            task.calls.insert(id, task.num_calls);
            task.num_calls += 1;
        } else if let Some(forward) = about.forward {
            task.calls.remove(&forward);
        }
    }

    pub(super) fn root_reaches_backward(&mut self, microbatch: MicrobatchId) {
        self.root_tasks.entry(microbatch).or_default().in_backward = true;
    }

    pub(super) fn root_returns(&mut self, microbatch: MicrobatchId) {
        self.root_tasks.entry(microbatch).or_default().has_returned = true;
    }

    /// A backward has left weight gradients: `key` is its request, `None` in the step function.
    pub(super) fn leaves_weights(
        &mut self,
        token: u64,
        microbatch: MicrobatchId,
        key: Option<RequestKey>,
    ) {
        let stage = if let Some(key) = key {
            let forward = self.forwards.get(&key);
            let call = forward.and_then(|forward| self.call(microbatch, *forward));
            call.map(|call| call.stage)
        } else {
            let task = self.root_tasks.get(&microbatch);
            let calls = task.map_or(0, RootTask::calls_before);
            self.list.stage_after(calls)
        };
        let unit = stage.map(|stage| StagePart {
            stage,
            part: Part::WeightGradient,
            microbatch,
        });
        self.weights.insert(token, unit);
    }

    /// Which unit it is that these weight gradients belong to.
    pub(super) fn weight_unit(&self, token: u64) -> Option<StagePart> {
        self.weights.get(&token).copied().flatten()
    }

    /// Which unit a request is.
    pub(super) fn request_unit(&self, request: &Request) -> Option<StagePart> {
        let (id, part) = match &request.work {
            Work::Forward(_) => (request.id, Part::Forward),
            work => (work.forward()?, Part::Backward),
        };
        let call = self.call(request.microbatch, (request.requester, id))?;
        Some(StagePart {
            stage: call.stage,
            part,
            microbatch: request.microbatch,
        })
    }

    /// Which unit the step function of a microbatch begins or goes on with: the stage that has as many stages of other
    /// ranks before it as there were calls. None where it only hands control on, as far as the program goes.
    pub(super) fn root_unit(&self, kind: ReadyKind, microbatch: MicrobatchId) -> Option<StagePart> {
        let task = self.root_tasks.get(&microbatch);
        let (calls, part) = match kind {
            ReadyKind::RootForward => (0, Part::Forward),
            ReadyKind::ResumeForward => (task.map_or(0, |task| task.num_calls), Part::Forward),
            _ => (task.map_or(0, RootTask::calls_before), Part::Backward),
        };
        Some(StagePart {
            stage: self.list.stage_after(calls)?,
            part,
            microbatch,
        })
    }

    pub(super) fn standing(&self, unit: Option<StagePart>) -> Standing {
        let place = unit.and_then(|unit| Some((unit, self.list.place(unit)?)));
        match place {
            Some((_, place)) if place == self.position => Standing::Next,
            Some((unit, place)) if place > self.position => Standing::Held(unit),
            _ => Standing::Free,
        }
    }

    /// Goes on in the list past all that has been done, or will not come. `has_weights` tells whether weight
    /// gradients of a unit are ready.
    pub(super) fn go_on(&mut self, has_weights: impl Fn(StagePart) -> bool) {
        while let Some(unit) = self.list.units().get(self.position)
            && self.is_past(*unit, &has_weights)
        {
            self.position += 1;
        }
    }

    fn is_past(&self, unit: StagePart, has_weights: &impl Fn(StagePart) -> bool) -> bool {
        let calls = || {
            let all = self.calls.get(&unit.microbatch);
            all.into_iter()
                .flat_map(BTreeMap::values)
                .filter(move |call| call.stage == unit.stage)
        };
        let root_task = self.root_tasks.get(&unit.microbatch);
        match unit.part {
            Part::WeightGradient => !has_weights(unit),
            _ if root_task.is_some_and(|task| task.has_returned) => true,
            _ if self.granted.contains(&unit) => true,
            Part::Forward => false,
            Part::Backward => calls().next().is_some() && calls().all(|call| !call.is_open),
        }
    }

    /// An item has the turn.
    pub(super) fn grants(&mut self, unit: Option<StagePart>, request: Option<&Request>) {
        if let Some(request) = request
            && let Some(forward) = request.work.forward()
        {
            let key = (request.requester, forward);
            self.forwards.insert((request.requester, request.id), key);
            self.ends_with_forward(request.microbatch, key);
        } else if let Some(unit) = unit.filter(|unit| unit.part != Part::WeightGradient) {
            self.granted.insert(unit);
        }
    }

    /// Why the forward that comes next will never come, where that can be told: the microbatch is in its backward.
    pub(super) fn misfit(
        &self,
        is_asked_for_backward: impl Fn(MicrobatchId) -> bool,
    ) -> Option<String> {
        let unit = self.list.units().get(self.position)?;
        let (microbatch, wanted) = (unit.microbatch, unit.stage);
        if unit.part != Part::Forward || wanted == 0 {
            return None;
        }
        let needed = self.list.calls_before(wanted).unwrap_or(0);
        if let Some(task) = self.root_tasks.get(&microbatch)
            && task.in_backward
            && task.num_calls < needed
        {
            return Some(format!(
                "the step function of microbatch {microbatch} has called other ranks {} times before its backward, \
                 but the program has {needed} of their stages there",
                task.num_calls
            ));
        }
        let calls = self.num_calls(microbatch);
        (calls > 0 && calls <= wanted && is_asked_for_backward(microbatch)).then(|| {
            format!(
                "the backward of microbatch {microbatch} is asked for, but only {calls} of its forwards were"
            )
        })
    }

    fn num_calls(&self, microbatch: MicrobatchId) -> usize {
        self.calls.get(&microbatch).map_or(0, BTreeMap::len)
    }

    fn call(&self, microbatch: MicrobatchId, key: RequestKey) -> Option<&Call> {
        self.calls.get(&microbatch)?.get(&key)
    }

    pub(super) fn place(&self, unit: StagePart) -> Option<usize> {
        self.list.place(unit)
    }

    /// Where a unit stands in the program, in words.
    pub(super) fn place_text(&self, unit: StagePart) -> String {
        let place = self
            .list
            .place(unit)
            .and_then(|place| self.list.action(place));
        place.map_or_else(String::new, |(action, number)| {
            format!("action {number}, {action}")
        })
    }
}

/// Where the rank stands: `stands at action 3 of 8 of the program, 1B0`.
impl fmt::Display for Order {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.list.num_actions();
        match self.list.action(self.position) {
            Some((action, number)) => write!(
                formatter,
                "stands at action {number} of {all} of the program, {action}"
            ),
            None => write!(formatter, "is through all {all} actions of the program"),
        }
    }
}

/// The index of what runs next: what holds others up before the program's next action, and weight gradients that the
/// program does not name when there is nothing else.
pub(super) fn choose(items: &[(Ready, Standing)]) -> Option<usize> {
    let free = |weights: bool| {
        items
            .iter()
            .enumerate()
            .filter(move |(_, (ready, standing))| {
                *standing == Standing::Free && (ready.kind == ReadyKind::WeightGradient) == weights
            })
    };
    let first_free: Vec<usize> = free(false).map(|(index, _)| index).collect();
    let order = Schedule::Interleaved {
        active: NonZeroU32::MAX,
    };
    let ready = first_free.iter().map(|index| &items[*index].0);
    if let Some(chosen) = order.choose(ready, &Progress::default()) {
        return Some(first_free[chosen]);
    }
    let next = items
        .iter()
        .enumerate()
        .filter(|(_, item)| item.1 == Standing::Next);
    next.chain(free(true))
        .min_by_key(|(_, (ready, standing))| {
            (*standing == Standing::Free, ready.microbatch, ready.arrival)
        })
        .map(|(index, _)| index)
}
