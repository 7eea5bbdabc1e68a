//! What the server counts.

use shardwright_wire::WorkKind;

/// Requests by what they ask for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkCounts {
    /// Forwards.
    pub forward: u64,
    /// Backwards.
    pub backward: u64,
    /// Closes.
    pub close: u64,
    /// Control requests.
    pub control: u64,
}

impl WorkCounts {
    pub(crate) fn count(&mut self, kind: WorkKind) {
        match kind {
            WorkKind::Forward => self.forward += 1,
            WorkKind::Backward => self.backward += 1,
            WorkKind::Close => self.close += 1,
            WorkKind::Control => self.control += 1,
        }
    }
}

/// What happened over a stretch of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TaskCounters {
    /// Requests sent to other ranks.
    pub sent: WorkCounts,
    /// Requests of other ranks that were answered.
    pub served: WorkCounts,
    /// Tasks given to workers.
    pub tasks: u64,
    /// Times a worker gave up the turn to wait.
    pub suspensions: u64,
    /// Times the turn went from one worker to another.
    pub switches: u64,
    /// The most workers that were pending at once.
    pub max_pending: u64,
}

/// Everything countable about a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Since the server was attached.
    pub total: TaskCounters,
    /// In the newest step.
    pub step: TaskCounters,
    /// Steps entered.
    pub steps: u64,
    /// Steps that failed.
    pub steps_failed: u64,
    /// Workers started, ever.
    pub workers_started: u64,
    /// Requests made or served that are not finished, and tasks that wait to run.
    pub live_requests: u64,
    /// Responses whose tensors are held for others.
    pub held_responses: u64,
    /// Messages dropped because their step is over.
    pub stale_messages: u64,
    /// Messages dropped because nothing here asked for them.
    pub unexpected_messages: u64,
    /// Messages of steps that this rank has not entered.
    pub kept_messages: u64,
}
