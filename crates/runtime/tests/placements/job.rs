//! The machines of a pipeline's ranks, a network between them, and workers that run a program as Python does in static
//! and fast mode: callers go on before results are there, and tensors go from holder to consumer.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::num::NonZeroU32;
use std::time::Duration;

use shardwright_core::{CallPath, MicrobatchId, Rank, RequestId, StepEpoch, WorkerId};
use shardwright_runtime::{Effect, Grant, Machine, MachineConfig, MainEvent, StepPlan, Task};
use shardwright_schedule::Schedule;
use shardwright_wire::{Message, Work};

use crate::trees::Program;
use crate::worker::Worker;

/// In which order messages arrive and workers go on, as far as that is open.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Timing {
    /// Callers run ahead of what they call, and the latest message arrives first.
    CallersFirst,
    /// All that is sent arrives before anybody goes on.
    MessagesFirst,
    /// By chance, from this seed.
    Chance(u64),
}

/// What may happen next.
enum Event {
    Arrival((usize, usize)),
    Progress(usize, usize),
}

/// A pipeline in one step.
pub(crate) struct Job<'a> {
    pub(crate) program: &'a Program,
    pub(crate) machines: Vec<Machine>,
    workers: Vec<Vec<Worker>>,
    /// First in, first out between two ranks; each message with its number among all.
    network: BTreeMap<(usize, usize), VecDeque<(u64, Message)>>,
    num_messages: u64,
    timing: Timing,
    /// Of each forward the requests that it made, which its backward runs backward.
    pub(crate) made: BTreeMap<(Rank, RequestId), Vec<(Rank, RequestId)>>,
    /// Of a forward in a chain, what its rank sends on.
    pub(crate) onward: BTreeMap<(Rank, RequestId), Vec<(usize, RequestId)>>,
    /// The forwards that each rank knows of and has not begun.
    known: Vec<BTreeSet<(MicrobatchId, CallPath)>>,
    is_done: bool,
}

pub(crate) const NOW: Duration = Duration::ZERO;

impl<'a> Job<'a> {
    /// Ranks as many as the program has, in a step.
    pub(crate) fn new(program: &'a Program, num_microbatches: u32, timing: Timing) -> Self {
        let ranks = program.ranks.iter().max().expect("there is a root") + 1;
        let machines = (0..ranks).map(|rank| {
            Machine::new(MachineConfig {
                rank: Rank(rank),
                pipeline: (0..ranks).map(Rank).collect(),
                tensor_group: Vec::new(),
                hosts: vec!["host".to_owned(); ranks as usize],
                stall_report: Duration::from_secs(1),
                stall_timeout: Duration::from_secs(1),
                trace_capacity: 1,
            })
        });
        let mut job = Self {
            program,
            machines: machines.collect(),
            workers: (0..ranks).map(|_| Vec::new()).collect(),
            network: BTreeMap::new(),
            num_messages: 0,
            timing,
            made: BTreeMap::new(),
            onward: BTreeMap::new(),
            known: (0..ranks).map(|_| BTreeSet::new()).collect(),
            is_done: false,
        };
        for rank in 0..ranks as usize {
            let plan = StepPlan {
                step: StepEpoch(1),
                function: "train_step".to_owned(),
                num_microbatches,
                schedule: Schedule::Interleaved {
                    active: NonZeroU32::new(num_microbatches).expect("there is one"),
                },
                one_at_a_time: false,
            };
            let machine = &mut job.machines[rank];
            machine.begin_step(plan, NOW).expect("no step is under way");
            machine.enter_main(NOW);
            job.settle(rank);
        }
        job
    }

    /// Runs the step as far as it goes; whether that is to its end.
    pub(crate) fn comes_to_an_end(mut self) -> bool {
        while let Some(event) = self.next_event() {
            match event {
                Event::Arrival((from, to)) => {
                    let queue = self.network.get_mut(&(from, to));
                    let (_, message) = queue.and_then(VecDeque::pop_front).expect("it was seen");
                    self.arrives(from, to, message);
                }
                Event::Progress(rank, worker) => self.goes_on(rank, worker),
            }
        }
        let live: u64 = self
            .machines
            .iter()
            .map(|one| one.stats().live_requests)
            .sum();
        self.is_done && live == 0
    }

    fn next_event(&mut self) -> Option<Event> {
        let arrivals = self.network.iter().filter_map(|(pair, queue)| {
            let (number, _) = queue.front()?;
            Some((*number, *pair))
        });
        let first = arrivals.clone().min().map(|(_, pair)| Event::Arrival(pair));
        let last = arrivals.clone().max().map(|(_, pair)| Event::Arrival(pair));
        let mut running = (0..self.workers.len()).filter_map(|rank| {
            let running = self.workers[rank].iter().position(|worker| worker.runs);
            Some(Event::Progress(rank, running?))
        });
        match &mut self.timing {
            Timing::CallersFirst => running.next().or(last),
            Timing::MessagesFirst => first.or_else(|| running.next()),
            Timing::Chance(seed) => {
                let arrivals = arrivals.map(|(_, pair)| Event::Arrival(pair));
                let mut events: Vec<Event> = arrivals.chain(running).collect();
                *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let chosen = (*seed >> 33) as usize;
                (!events.is_empty()).then(|| events.swap_remove(chosen % events.len()))
            }
        }
    }

    fn arrives(&mut self, from: usize, to: usize, message: Message) {
        if let Message::Request(request) = &message
            && matches!(request.work, Work::Forward(_))
        {
            self.known[to].insert((request.microbatch, request.path.clone()));
        }
        self.machines[to].deliver(Rank(from as u32), message, NOW);
        self.settle(to);
    }

    fn goes_on(&mut self, rank: usize, index: usize) {
        let id = WorkerId(index as u32);
        let mut worker = std::mem::take(&mut self.workers[rank][index]);
        worker.goes_on(self, rank, id);
        self.workers[rank][index] = worker;
        self.settle(rank);
    }

    /// Does what a machine asks its shell to do.
    fn settle(&mut self, rank: usize) {
        loop {
            let effects = self.machines[rank].take_effects();
            if effects.is_empty() {
                return;
            }
            for effect in effects {
                match effect {
                    Effect::Send { to, message } => {
                        self.num_messages += 1;
                        let queue = self.network.entry((rank, to.0 as usize)).or_default();
                        queue.push_back((self.num_messages, message));
                    }
                    Effect::WakeMain => self.wake_main(rank),
                    Effect::WakeWorker(worker) => self.wake(rank, worker),
                }
            }
        }
    }

    fn wake_main(&mut self, rank: usize) {
        match self.machines[rank].poll_main(NOW) {
            Some(MainEvent::StartWorker(worker)) => {
                self.workers[rank].push(Worker::default());
                self.machines[rank]
                    .worker_returns(worker, NOW)
                    .expect("it comes up");
            }
            Some(MainEvent::RootDone) => self.is_done = true,
            _ => {}
        }
    }

    fn wake(&mut self, rank: usize, id: WorkerId) {
        let Some(grant) = self.machines[rank].take_grant(id) else {
            return;
        };
        match grant {
            Grant::Task(task) => {
                if let Task::Request(request) = &task
                    && matches!(request.work, Work::Forward(_))
                {
                    // EX-14
                    let known = &mut self.known[rank];
                    let own = (request.microbatch, request.path.clone());
                    let mut earlier =
                        known.range((request.microbatch, CallPath::default())..own.clone());
                    assert_eq!(
                        earlier.next(),
                        None,
                        "an earlier call than {own:?} has not begun"
                    );
                    known.remove(&own);
                }
                self.workers[rank][id.0 as usize].begin(self.program, &task, &self.made);
            }
            Grant::Resume => self.workers[rank][id.0 as usize].runs = true,
            Grant::Aborted | Grant::Closed => {}
        }
    }
}
