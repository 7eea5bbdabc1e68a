//! What Python does in a task, request by request.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use shardwright_core::{CallId, MicrobatchId, ModelId, ModuleId, Rank, RequestId, WorkerId};
use shardwright_runtime::{About, Expected, NewRequest, Task, Waiting};
use shardwright_wire::{
    BackwardCall, Body, Buffer, ForwardCall, HeldTensor, Phase, Place, TensorMeta, TensorPart,
    Value, Work,
};

use crate::job::{Job, NOW};
use crate::trees::Program;

/// More than comes with an answer.
const ELEMENTS: u64 = 1025;

/// A request of the task that runs: who answers, and its id.
type Made = (Rank, RequestId);

/// A call under way in a task: those of the task's own rank are within one another.
#[derive(Clone, Debug)]
struct Call {
    node: usize,
    num_made: usize,
    /// What it was given, and what its last call gave: a result that is elsewhere, or a tensor that is here.
    given: Option<Made>,
    last: Option<Made>,
}

/// What a task does after its forward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Then {
    #[default]
    Forward,
    Backward,
    End,
}

#[derive(Debug, Default)]
pub(crate) struct Worker {
    /// Whether it has the turn.
    pub(crate) runs: bool,
    microbatch: MicrobatchId,
    /// The request that it serves; none in the step function.
    serves: Option<(Rank, RequestId)>,
    calls: Vec<Call>,
    then: Then,
    /// The forwards that it has asked for, in order.
    made: Vec<Made>,
    /// Those whose answers it has not taken.
    unanswered: Vec<RequestId>,
    /// Those still to be run backward.
    to_reverse: Vec<Made>,
    /// What it waits for.
    waits: Vec<RequestId>,
}

/// The values of every tensor; all share them, for the search makes millions.
static VALUES: LazyLock<Buffer> = LazyLock::new(|| Buffer::copy_of(&[0; 4 * ELEMENTS as usize]));

fn part(held: Option<HeldTensor>) -> TensorPart {
    let meta = TensorMeta {
        dtype: "float32".to_owned(),
        shape: vec![ELEMENTS],
        strides: vec![1],
        device: "cpu".to_owned(),
        requires_grad: true,
    };
    let data = match held {
        None => VALUES.clone(),
        Some(_) => Buffer::default(),
    };
    TensorPart { meta, data, held }
}

fn body(held: Option<HeldTensor>) -> Body {
    Body {
        value: Value::Tensor(0),
        tensors: vec![part(held)],
    }
}

fn new_request(work: Work, microbatch: MicrobatchId, body: Body) -> NewRequest {
    let is_forward = matches!(work, Work::Forward(_));
    NewRequest {
        model: ModelId(0),
        work,
        microbatch,
        place: Place {
            parent: None,
            call: CallId(0),
        },
        hold: is_forward,
        expected: is_forward.then(expected),
        body,
    }
}

fn expected() -> Expected {
    Expected::of(&body(None).into())
}

fn forward(node: usize) -> Work {
    ForwardCall::new(ModuleId(node as u32)).into()
}

impl Worker {
    /// Has the turn with a new task.
    pub(crate) fn begin(
        &mut self,
        program: &Program,
        task: &Task,
        made: &BTreeMap<(Rank, RequestId), Vec<Made>>,
    ) {
        *self = Self {
            runs: true,
            ..Self::default()
        };
        let node = match task {
            Task::Root { microbatch } => {
                self.microbatch = *microbatch;
                0
            }
            Task::Request(request) => {
                self.microbatch = request.microbatch;
                self.serves = Some((request.requester, request.id));
                match &request.work {
                    Work::Forward(call) => call.module.0 as usize,
                    Work::Backward(call) => {
                        self.to_reverse
                            .clone_from(&made[&(request.requester, call.forward)]);
                        self.then = Then::Backward;
                        return;
                    }
                    _ => unreachable!("nothing else is asked for"),
                }
            }
            Task::WeightGradient(_) => unreachable!("no backward is split"),
        };
        assert!(node < program.calls.len());
        self.calls.push(Call {
            node,
            num_made: 0,
            given: None,
            last: None,
        });
    }

    /// Goes on up to the next request, wait, or end.
    pub(crate) fn goes_on(&mut self, job: &mut Job<'_>, rank: usize, id: WorkerId) {
        let waited = std::mem::take(&mut self.waits);
        if !waited.is_empty() {
            job.machines[rank]
                .take_responses(&waited)
                .expect("they are there");
        }
        match self.then {
            Then::Forward => self.goes_forward(job, rank, id),
            Then::Backward => self.goes_backward(job, rank, id),
            Then::End => self.ends(job, rank, id),
        }
    }

    fn goes_forward(&mut self, job: &mut Job<'_>, rank: usize, id: WorkerId) {
        let program = job.program;
        let Some(call) = self.calls.last_mut() else {
            self.then = if self.serves.is_none() {
                Then::Backward
            } else {
                Then::End
            };
            self.to_reverse = self.made.clone();
            if self.serves.is_none()
                && job.machines[rank].begin_backward_elsewhere(id, NOW) != Ok(true)
            {
                job.machines[rank]
                    .await_backward(id, NOW)
                    .expect("the step runs");
                self.runs = false;
            }
            return;
        };
        if let Some(node) = program.calls[call.node].get(call.num_made).copied() {
            call.num_made += 1;
            let given = if program.is_given_last[node] {
                call.last
            } else {
                call.given
            };
            if program.ranks[node] as usize == rank {
                self.calls.push(Call {
                    node,
                    num_made: 0,
                    given,
                    last: given,
                });
            } else {
                self.asks(job, rank, id, node, given);
            }
            return;
        }
        // It computes with what it was given if it calls nobody; what another task gets back has to be here.
        let is_leaf = program.calls[call.node].is_empty();
        let needed = if is_leaf { call.given } else { call.last };
        let is_inner = self.calls.len() > 1;
        if (is_leaf || !is_inner)
            && let Some(made) = needed
        {
            let call = self.calls.last_mut().expect("it is under way");
            call.given = None;
            call.last = None;
            self.brings(job, rank, id, made);
            return;
        }
        self.calls.pop();
        if let Some(caller) = self.calls.last_mut() {
            caller.last = needed;
        }
    }

    /// Asks another rank for a forward, and those behind it for what follows where results go straight on.
    fn asks(
        &mut self,
        job: &mut Job<'_>,
        rank: usize,
        id: WorkerId,
        node: usize,
        given: Option<Made>,
    ) {
        let program = job.program;
        let call = self.calls.last_mut().expect("it asks");
        let mut nodes = vec![node];
        while program.chains
            && let Some(next) = program.calls[call.node].get(call.num_made).copied()
            && program.is_given_last[next]
            && program.ranks[next] as usize != rank
            && program.ranks[next] != program.ranks[nodes[nodes.len() - 1]]
        {
            nodes.push(next);
            call.num_made += 1;
        }
        let machine = &mut job.machines[rank];
        let mut onward = Vec::new();
        for next in &nodes[1..] {
            let to = Rank(program.ranks[*next]);
            let about = About::new(ModelId(0), &forward(*next), self.microbatch);
            let announced = machine.announce_request(id, to, &about, Some(expected()));
            onward.push((*next, announced.expect("the step runs")));
        }
        let held = given.map(|(holder, request)| HeldTensor {
            holder,
            requester: Rank(rank as u32),
            request,
            index: 0,
        });
        let to = Rank(program.ranks[node]);
        let request = new_request(forward(node), self.microbatch, body(held));
        let request = machine
            .send_request(Some(id), to, request, NOW)
            .expect("the step runs");
        job.onward
            .insert((Rank(rank as u32), request), onward.clone());
        self.made.push((to, request));
        self.made.extend(
            onward
                .iter()
                .map(|(node, request)| (Rank(program.ranks[*node]), *request)),
        );
        self.unanswered.push(request);
        self.unanswered
            .extend(onward.iter().map(|(_, request)| *request));
        let last = self.made[self.made.len() - 1];
        let call = self.calls.last_mut().expect("it asks");
        if program.is_looked_at[nodes[nodes.len() - 1]] {
            call.last = None;
            self.brings(job, rank, id, last);
        } else {
            call.last = Some(last);
        }
    }

    /// Waits for the values of a result.
    fn brings(&mut self, job: &mut Job<'_>, rank: usize, id: WorkerId, (holder, request): Made) {
        let tensor = HeldTensor {
            holder,
            requester: Rank(rank as u32),
            request,
            index: 0,
        };
        let fetched = job.machines[rank]
            .fetch(id, tensor, NOW)
            .expect("the step runs");
        self.waits_for(job, rank, id, vec![fetched], Phase::Forward);
    }

    fn waits_for(
        &mut self,
        job: &mut Job<'_>,
        rank: usize,
        id: WorkerId,
        requests: Vec<RequestId>,
        phase: Phase,
    ) {
        let waiting = job.machines[rank].wait(id, &requests, phase, NOW);
        self.runs = waiting == Ok(Waiting::Over);
        self.waits = requests;
    }

    fn goes_backward(&mut self, job: &mut Job<'_>, rank: usize, id: WorkerId) {
        let Some((to, forward)) = self.to_reverse.pop() else {
            self.then = Then::End;
            return;
        };
        let call = BackwardCall::new(ModuleId(0), forward);
        let request = new_request(call.into(), self.microbatch, body(None));
        let machine = &mut job.machines[rank];
        let request = machine
            .send_request(Some(id), to, request, NOW)
            .expect("the step runs");
        self.waits_for(job, rank, id, vec![request], Phase::Backward);
    }

    /// Waits for the answers to all it has asked for, hands its result on, and answers.
    fn ends(&mut self, job: &mut Job<'_>, rank: usize, id: WorkerId) {
        let unanswered = std::mem::take(&mut self.unanswered);
        if !unanswered.is_empty() {
            self.waits_for(job, rank, id, unanswered, Phase::Forward);
            return;
        }
        if let Some((requester, request)) = self.serves {
            let key = (requester, request);
            let mut onward = job.onward.remove(&key).unwrap_or_default();
            if !onward.is_empty() {
                let (node, next) = onward.remove(0);
                job.onward.insert((requester, next), onward);
                let to = Rank(job.program.ranks[node]);
                let new = new_request(forward(node), self.microbatch, body(None));
                let sent = job.machines[rank].send_request_for(id, (requester, next), to, new, NOW);
                sent.expect("the step runs");
            }
            job.made.insert(key, std::mem::take(&mut self.made));
            job.machines[rank]
                .respond(requester, request, body(None), NOW)
                .expect("it is served");
        }
        self.runs = false;
        job.machines[rank]
            .worker_returns(id, NOW)
            .expect("it had the turn");
    }
}
