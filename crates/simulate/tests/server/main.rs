//! The simulation of the execution server against the server's own machines, on a clock that is
//! moved by hand: the same tasks, each at the same time.

mod draws;
mod orders;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::num::NonZeroU32;
use std::time::Duration;

use draws::cases;
use proptest::prelude::*;
use shardwright_core::{
    CallId, MicrobatchId, ModelId, ModuleId, Rank, RequestId, StepEpoch, WorkerId,
};
use shardwright_runtime::{
    Effect, Grant, Machine, MachineConfig, MainEvent, NewRequest, StepPlan, Task, Waiting,
};
use shardwright_schedule::{ActionKind, Schedule};
use shardwright_simulate::{Chain, Latency, StageCosts, StepCosts, TaskKind, simulate_schedule};
use shardwright_wire::{BackwardCall, Body, ForwardCall, Message, Phase, Place, Value, Work};

/// Rank, segment, what, microbatch, start, end.
type Slice = (u32, u32, TaskKind, u32, Duration, Duration);

/// What a worker does next, as the Python code of a step would.
#[derive(Clone, Copy, Debug)]
enum Operation {
    Compute(u32, TaskKind, Duration),
    Call(u32, Phase),
    AwaitBackward,
    Defer(u32),
    Respond(Rank, RequestId),
}

#[derive(Default)]
struct Worker {
    operations: VecDeque<Operation>,
    microbatch: u32,
    waits: Vec<RequestId>,
}

enum WorkerEvent {
    Message(Rank, Rank, Message),
    Computed(usize, WorkerId),
}

struct Servers<'a> {
    schedule: Schedule,
    chain: &'a Chain,
    costs: &'a [Vec<StageCosts>],
    latency: Duration,
    now: Duration,
    machines: Vec<Machine>,
    workers: Vec<BTreeMap<WorkerId, Worker>>,
    queue: BinaryHeap<Reverse<(Duration, u64)>>,
    events: BTreeMap<u64, WorkerEvent>,
    /// The forward requests, by segment and microbatch.
    forwards: BTreeMap<(u32, u32), RequestId>,
    /// Of which segment weight gradients are, by rank and token.
    deferred: BTreeMap<(usize, u64), u32>,
    slices: Vec<Slice>,
}

fn body() -> Body {
    Body {
        value: Value::None,
        tensors: Vec::new(),
    }
}

impl<'a> Servers<'a> {
    fn new(
        schedule: Schedule,
        chain: &'a Chain,
        costs: &'a [Vec<StageCosts>],
        latency: Duration,
    ) -> Self {
        let highest = chain.segments.iter().max().expect("a chain has segments").0;
        let pipeline: Vec<Rank> = (0..=highest).map(Rank).collect();
        let machines = pipeline.iter().map(|rank| {
            Machine::new(MachineConfig {
                rank: *rank,
                pipeline: pipeline.clone(),
                tensor_group: Vec::new(),
                hosts: pipeline.iter().map(|_| "host".to_owned()).collect(),
                stall_report: Duration::from_secs(1_000_000),
                stall_timeout: Duration::from_secs(1_000_000),
                trace_capacity: 16,
            })
        });
        Self {
            schedule,
            chain,
            costs,
            latency,
            now: Duration::ZERO,
            machines: machines.collect(),
            workers: pipeline.iter().map(|_| BTreeMap::new()).collect(),
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            forwards: BTreeMap::new(),
            deferred: BTreeMap::new(),
            slices: Vec::new(),
        }
    }

    fn run(mut self) -> Vec<Slice> {
        for rank in (0..self.machines.len()).rev() {
            let plan = StepPlan {
                step: StepEpoch(1),
                function: "train_step".to_owned(),
                num_microbatches: self.costs.len() as u32,
                one_at_a_time: false,
                schedule: self.schedule.clone(),
            };
            let machine = &mut self.machines[rank];
            machine
                .begin_step(plan, self.now)
                .expect("no step is under way");
            machine.enter_main(self.now);
            self.settle(rank);
        }
        while let Some(Reverse((time, number))) = self.queue.pop() {
            self.now = time;
            match self.events.remove(&number).expect("it was foreseen") {
                WorkerEvent::Message(from, to, message) => {
                    self.machines[to.0 as usize].deliver(from, message, self.now);
                    self.settle(to.0 as usize);
                }
                WorkerEvent::Computed(rank, worker) => self.proceed(rank, worker),
            }
        }
        self.slices.sort_by_key(|slice| (slice.4, slice.0));
        self.slices
    }

    fn foresee(&mut self, time: Duration, event: WorkerEvent) {
        // Later than all that are still to come.
        let number = self.events.last_key_value().map_or(0, |(last, _)| last + 1);
        self.events.insert(number, event);
        self.queue.push(Reverse((time, number)));
    }

    /// Does what a machine asks its shell to do.
    fn settle(&mut self, rank: usize) {
        loop {
            let actions = self.machines[rank].take_effects();
            if actions.is_empty() {
                return;
            }
            for action in actions {
                match action {
                    Effect::Send { to, message } => {
                        let from = Rank(rank as u32);
                        self.foresee(
                            self.now + self.latency,
                            WorkerEvent::Message(from, to, message),
                        );
                    }
                    Effect::WakeMain => {
                        if let Some(MainEvent::StartWorker(worker)) =
                            self.machines[rank].poll_main(self.now)
                        {
                            self.workers[rank].insert(worker, Worker::default());
                            self.machines[rank]
                                .worker_returns(worker, self.now)
                                .expect("it comes up");
                        }
                    }
                    Effect::WakeWorker(worker) => self.wake(rank, worker),
                }
            }
        }
    }

    fn wake(&mut self, rank: usize, id: WorkerId) {
        let Some(grant) = self.machines[rank].take_grant(id) else {
            return;
        };
        match grant {
            Grant::Task(task) => {
                let (microbatch, operations) = self.script(rank, &task);
                let worker = self.workers[rank].get_mut(&id).expect("it was started");
                worker.microbatch = microbatch;
                worker.operations = operations;
            }
            Grant::Resume => {
                let worker = self.workers[rank].get_mut(&id).expect("it was started");
                let waits = std::mem::take(&mut worker.waits);
                self.machines[rank]
                    .take_responses(&waits)
                    .expect("they are there");
            }
            Grant::Aborted | Grant::Closed => panic!("no step fails"),
        }
        self.proceed(rank, id);
    }

    fn proceed(&mut self, rank: usize, id: WorkerId) {
        let now = self.now;
        loop {
            let worker = self.workers[rank].get_mut(&id).expect("it was started");
            let microbatch = worker.microbatch;
            let machine = &mut self.machines[rank];
            let Some(operation) = worker.operations.pop_front() else {
                machine.worker_returns(id, now).expect("it had the turn");
                return self.settle(rank);
            };
            match operation {
                Operation::Compute(segment, kind, cost) => {
                    if kind != TaskKind::Turn || !cost.is_zero() {
                        let slice = (rank as u32, segment, kind, microbatch, now, now + cost);
                        self.slices.push(slice);
                    }
                    return self.foresee(now + cost, WorkerEvent::Computed(rank, id));
                }
                Operation::Call(segment, phase) => {
                    let to = Rank(self.chain.segments[segment as usize].0);
                    let forward = self.forwards.get(&(segment, microbatch)).copied();
                    let request = new_request(segment, phase, microbatch, forward);
                    let request = machine
                        .send_request(Some(id), to, request, now)
                        .expect("the step runs");
                    self.forwards
                        .entry((segment, microbatch))
                        .or_insert(request);
                    worker.waits = vec![request];
                    let waiting = machine.wait(id, &worker.waits, phase, now);
                    assert_eq!(waiting, Ok(Waiting::Suspended));
                    return self.settle(rank);
                }
                Operation::AwaitBackward => {
                    machine.await_backward(id, now).expect("the step runs");
                    return self.settle(rank);
                }
                Operation::Defer(segment) => {
                    let token = machine.defer_weight_gradient(id).expect("the step runs");
                    self.deferred.insert((rank, token), segment);
                }
                Operation::Respond(to, request) => {
                    machine
                        .respond(to, request, body(), now)
                        .expect("it is served");
                }
            }
            self.settle(rank);
        }
    }

    /// What Python does in a task.
    fn script(&self, rank: usize, task: &Task) -> (u32, VecDeque<Operation>) {
        match task {
            Task::Root { microbatch } => (microbatch.0, self.step_function(microbatch.0)),
            Task::Request(request) => {
                let microbatch = request.microbatch.0;
                let mut operations = match &request.work {
                    Work::Forward(call) => self.forward(call.module.0, microbatch),
                    Work::Backward(call) => self.backward(call.module.0, microbatch),
                    other => panic!("{other:?} is not asked for"),
                };
                operations.push_back(Operation::Respond(request.requester, request.id));
                (microbatch, operations)
            }
            Task::WeightGradient(deferred) => {
                let microbatch = deferred.microbatch.0;
                let kind = ActionKind::WeightGradient;
                let segment = self.deferred[&(rank, deferred.token)];
                let operation = self.compute(segment, kind, microbatch);
                (microbatch, VecDeque::from([operation]))
            }
        }
    }

    fn step_function(&self, microbatch: u32) -> VecDeque<Operation> {
        let turn = |segment, cost| Operation::Compute(segment, TaskKind::Turn, cost);
        let num_segments = self.chain.segments.len() as u32;
        let is_mine = |segment: u32| self.chain.segments[segment as usize].0 == 0;
        let mut operations = VecDeque::new();
        for phase in [Phase::Forward, Phase::Backward] {
            let mut has_waited = false;
            for index in 0..num_segments {
                let segment = match phase {
                    Phase::Forward => index,
                    Phase::Backward => num_segments - 1 - index,
                };
                if is_mine(segment) {
                    operations.extend(match phase {
                        Phase::Forward => self.forward(segment, microbatch),
                        Phase::Backward => self.backward(segment, microbatch),
                    });
                    has_waited = false;
                    continue;
                }
                if has_waited {
                    operations.push_back(turn(segment, self.chain.root_turn));
                }
                operations.push_back(Operation::Call(segment, phase));
                has_waited = true;
            }
            if phase == Phase::Forward {
                let last = num_segments - 1;
                if has_waited {
                    operations.push_back(turn(last, self.chain.root_turn));
                }
                operations.push_back(Operation::AwaitBackward);
                operations.push_back(turn(last, self.chain.root_backward));
            }
        }
        operations
    }

    fn forward(&self, segment: u32, microbatch: u32) -> VecDeque<Operation> {
        VecDeque::from([self.compute(segment, ActionKind::Forward, microbatch)])
    }

    fn backward(&self, segment: u32, microbatch: u32) -> VecDeque<Operation> {
        if self.schedule.splits_backward() {
            let input = self.compute(segment, ActionKind::InputGradient, microbatch);
            VecDeque::from([input, Operation::Defer(segment)])
        } else {
            VecDeque::from([self.compute(segment, ActionKind::FullBackward, microbatch)])
        }
    }

    fn compute(&self, segment: u32, kind: ActionKind, microbatch: u32) -> Operation {
        let cost = self.costs[microbatch as usize][segment as usize].of(kind);
        Operation::Compute(segment, TaskKind::Action(kind), cost)
    }
}

fn new_request(
    segment: u32,
    phase: Phase,
    microbatch: u32,
    forward: Option<RequestId>,
) -> NewRequest {
    let module = ModuleId(segment);
    NewRequest {
        model: ModelId(0),
        work: match phase {
            Phase::Forward => ForwardCall::new(module).into(),
            Phase::Backward => BackwardCall::new(module, forward.expect("it went forward")).into(),
        },
        microbatch: MicrobatchId(microbatch),
        place: Place {
            parent: None,
            call: CallId(0),
        },
        hold: false,
        expected: None,
        body: body(),
    }
}

fn schedules() -> impl Strategy<Value = Schedule> {
    let active = || (1_u32..7).prop_map(|active| NonZeroU32::new(active).expect("at least one"));
    prop_oneof![
        Just(Schedule::Simple),
        active().prop_map(|active| Schedule::Interleaved { active }),
        active().prop_map(|active| Schedule::Looped { active }),
        active().prop_map(|active| Schedule::ZeroBubble { active }),
    ]
}

proptest! {
    #[test]
    fn the_simulation_does_what_the_server_does(schedule in schedules(), (chain, costs, latency) in cases()) {
        let served = Servers::new(schedule.clone(), &chain, &costs, latency).run();
        let microbatches = NonZeroU32::new(costs.len() as u32).expect("at least one");
        let latency = Latency::Uniform(latency);
        let simulated =
            simulate_schedule(&schedule, &chain, microbatches, &StepCosts::ByMicrobatch(costs), &latency);
        let simulated: Vec<Slice> = simulated
            .expect("a good chain")
            .tasks
            .iter()
            .map(|task| (task.rank.0, task.stage.0, task.kind, task.microbatch.0, task.start, task.end))
            .collect();
        prop_assert_eq!(served, simulated);
    }
}
