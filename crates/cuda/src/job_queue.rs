//! What the thread of the device is given to do.
//!
//! Only those who send wait for room, and never the thread itself, which makes it: whoever is told of a loss in that
//! thread may answer with messages (CU-7).

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use shardwright_core::Rank;
use shardwright_wire::Message;

use super::raw::CudaEvent;

/// Something that stays until an event is done.
pub type Retained = (CudaEvent, Box<dyn Any + Send>);

/// Work for the thread.
pub enum Job {
    /// A message for a rank, with tensors of a device, or behind one that has some.
    Send(Rank, Message),
    /// Something that stays.
    Keep(Retained),
    /// There may be peers' buffers to open.
    Look,
    /// The thread is to end.
    Close,
}

/// Why a message is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// None is taken any more.
    Closed,
    /// So many wait for its rank, for too long.
    Full(usize),
}

/// How many messages may wait for a rank, and for how long a further one waits for room.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// How many.
    pub capacity: usize,
    /// For how long.
    pub timeout: Duration,
}

/// The jobs of the thread.
#[derive(Default)]
pub struct JobQueue {
    state: Mutex<State>,
    /// There is a job, or room.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// How many messages wait for each rank.
    waiting: BTreeMap<Rank, usize>,
    thread: Option<ThreadId>,
    served: bool,
    closed: bool,
    ended: bool,
}

impl JobQueue {
    /// Whether nobody serves it yet; the caller's thread will.
    pub fn claim(&self) -> bool {
        !std::mem::replace(&mut self.lock().served, true)
    }

    /// The calling thread serves it from now on.
    pub fn serve(&self) {
        self.lock().thread = Some(std::thread::current().id());
    }

    /// Takes a message that has tensors of a device (`waits`) or comes behind one that has; gives any other back, which
    /// may leave at once.
    pub fn pass(
        &self,
        to: Rank,
        message: Message,
        waits: bool,
        bounds: Bounds,
    ) -> Result<Option<Message>, Refused> {
        let deadline = Instant::now() + bounds.timeout;
        let mut state = self.lock();
        let own = state.thread == Some(std::thread::current().id());
        loop {
            let queued = state.waiting.get(&to).copied().unwrap_or(0);
            if !waits && queued == 0 {
                return Ok(Some(message));
            }
            if state.closed {
                return Err(Refused::Closed);
            }
            if own || queued < bounds.capacity {
                // Under the lock, so that two threads' messages for one rank cannot change places.
                state.jobs.push_back(Job::Send(to, message));
                *state.waiting.entry(to).or_default() += 1;
                drop(state);
                self.changed.notify_all();
                return Ok(None);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Refused::Full(queued));
            }
            let woken = self.changed.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// A message has left.
    pub fn has_left(&self, to: Rank) {
        if let Some(count) = self.lock().waiting.get_mut(&to) {
            *count -= 1;
        }
        self.changed.notify_all();
    }

    /// Gives the thread something to do, and never waits; the job comes back when the thread has ended.
    pub fn push(&self, job: Job) -> Result<(), Job> {
        let mut state = self.lock();
        if state.ended {
            return Err(job);
        }
        state.jobs.push_back(job);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// All that there is to do; waits for something at most so long.
    pub fn take(&self, timeout: Duration) -> VecDeque<Job> {
        let state = self.lock();
        let nothing = |state: &mut State| state.jobs.is_empty();
        let woken = self.changed.wait_timeout_while(state, timeout, nothing);
        std::mem::take(&mut woken.unwrap_or_else(PoisonError::into_inner).0.jobs)
    }

    /// No message is taken any more.
    pub fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// The thread has ended; what it leaves undone.
    pub fn end(&self) -> VecDeque<Job> {
        let mut state = self.lock();
        state.closed = true;
        state.ended = true;
        std::mem::take(&mut state.jobs)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use shardwright_core::StepEpoch;
    use shardwright_wire::StepBegin;

    use super::*;

    const BOUNDS: Bounds = Bounds {
        capacity: 100,
        timeout: Duration::from_secs(30),
    };

    fn numbered(number: u64) -> Message {
        Message::StepBegin(StepBegin {
            step: StepEpoch(number),
            function: "train".to_owned(),
            num_microbatches: 1,
            one_at_a_time: false,
        })
    }

    #[test]
    fn the_thread_itself_never_waits_for_room_and_others_do_until_it_makes_some() {
        let inbox = JobQueue::default();
        assert!(inbox.claim() && !inbox.claim());
        inbox.serve();
        let began = Instant::now();
        let peer = Rank(1);
        for number in 0..=BOUNDS.capacity as u64 {
            assert_eq!(
                inbox.pass(peer, numbered(number), true, BOUNDS).unwrap(),
                None
            );
        }
        assert!(began.elapsed() < BOUNDS.timeout / 2);
        std::thread::scope(|scope| {
            let other = scope.spawn(|| inbox.pass(peer, numbered(0), false, BOUNDS));
            // Another rank's messages, and what is kept, find room meanwhile.
            assert!(
                inbox
                    .pass(Rank(2), numbered(0), true, BOUNDS)
                    .unwrap()
                    .is_none()
            );
            assert!(inbox.push(Job::Look).is_ok());
            std::thread::sleep(Duration::from_millis(20));
            assert!(!other.is_finished());
            for _ in inbox.take(Duration::ZERO).into_iter().take(2) {
                inbox.has_left(peer);
            }
            assert!(other.join().unwrap().unwrap().is_none());
        });
    }

    #[test]
    fn a_message_passes_where_nothing_of_its_rank_waits() {
        let inbox = JobQueue::default();
        let light = numbered(1);
        assert_eq!(
            inbox.pass(Rank(1), light.clone(), false, BOUNDS).unwrap(),
            Some(light)
        );
        assert!(
            inbox
                .pass(Rank(1), numbered(2), true, BOUNDS)
                .unwrap()
                .is_none()
        );
        assert!(
            inbox
                .pass(Rank(1), numbered(3), false, BOUNDS)
                .unwrap()
                .is_none()
        );
        inbox.has_left(Rank(1));
        inbox.has_left(Rank(1));
        assert!(
            inbox
                .pass(Rank(1), numbered(4), false, BOUNDS)
                .unwrap()
                .is_some()
        );
        inbox.close();
        let refused = inbox.pass(Rank(1), numbered(5), true, BOUNDS).unwrap_err();
        assert!(matches!(refused, Refused::Closed));
        assert_eq!(inbox.end().len(), 2);
        assert!(inbox.push(Job::Look).is_err());
    }
}
