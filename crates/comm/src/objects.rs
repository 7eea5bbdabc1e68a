//! Plain objects between ranks: queues by sender and channel, and a barrier.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, OnceLock, PoisonError, Weak};

use shardwright_core::Rank;
use shardwright_wire::{Body, ErrorReport, Message, ObjectMessage, TensorPart, Value};

use crate::deadline::Deadline;
use crate::error::{CommError, describe_loss};
use crate::transport::{Loss, Observation, Transport};
use shardwright_system::sync::thread::{self, ThreadId};
use shardwright_system::sync::{Condvar, Mutex, MutexGuard};

/// How many objects of one sender may wait, over all channels. A sender never waits for its
/// receiver (CM-1), so a receiver that never asks has to be an error somewhere.
pub(crate) const CAPACITY: usize = 65_536;

/// How many bytes of tensors they may have: as many as the largest tensor.
pub(crate) const CAPACITY_BYTES: u64 = 64 << 30;

/// Objects that have arrived and wait to be received.
#[derive(Default)]
pub struct ObjectPlane {
    state: Mutex<State>,
    changed: Condvar,
    transport: OnceLock<Weak<dyn Transport>>,
}

#[derive(Default)]
struct State {
    queues: BTreeMap<(Rank, String), VecDeque<Body>>,
    waiting: BTreeMap<Rank, Waiting>,
    /// The channel of the first object of a sender that found no room.
    overflown: BTreeMap<Rank, String>,
    lost: BTreeMap<Rank, Loss>,
    /// How many threads wait for `changed`: to tell nobody costs a system call too.
    asleep: usize,
    /// The threads that receive by themselves while they wait.
    reading: Vec<ThreadId>,
    closed: bool,
}

/// What waits of one sender.
#[derive(Clone, Copy, Default)]
struct Waiting {
    objects: usize,
    bytes: u64,
}

fn bytes_of(body: &Body) -> u64 {
    let bytes = |tensor: &TensorPart| tensor.data.len() as u64;
    body.tensors.iter().map(bytes).sum()
}

impl ObjectPlane {
    /// Lets threads be woken that wait while they receive by themselves.
    pub fn connect(&self, transport: &Arc<dyn Transport>) {
        // A second call would bring the same transport.
        self.transport.get_or_init(|| Arc::downgrade(transport));
    }

    /// An object has arrived.
    pub fn push(&self, from: Rank, object: ObjectMessage) {
        let mut state = self.lock();
        // What follows a lost object is not received either: nobody would see the gap.
        if !state.overflown.contains_key(&from) {
            let waiting = state.waiting.get(&from).copied().unwrap_or_default();
            let with_it = Waiting {
                objects: waiting.objects + 1,
                bytes: waiting.bytes.saturating_add(bytes_of(&object.body)),
            };
            if with_it.objects > CAPACITY || with_it.bytes > CAPACITY_BYTES {
                state.overflown.insert(from, object.channel);
            } else {
                state.waiting.insert(from, with_it);
                let key = (from, object.channel);
                state.queues.entry(key).or_default().push_back(object.body);
            }
        }
        self.wake(state);
    }

    /// Wakes who waits, but for this thread, which looks by itself.
    fn wake(&self, state: MutexGuard<'_, State>) {
        let asleep = state.asleep > 0;
        let this = thread::current().id();
        let reads = state.reading.iter().any(|thread| *thread != this);
        drop(state);
        if asleep {
            self.changed.notify_all();
        }
        if reads && let Some(transport) = self.transport.get().and_then(Weak::upgrade) {
            transport.wake_reader();
        }
    }

    /// A peer is gone: what it sent can still be received, then waiting for it fails.
    pub fn peer_lost(&self, rank: Rank, loss: Loss) {
        let mut state = self.lock();
        state.lost.entry(rank).or_insert(loss);
        self.wake(state);
    }

    /// Ends all waiting for good, and drops what nobody has received.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let unreceived = std::mem::take(&mut state.queues);
        self.wake(state);
        drop(unreceived);
    }

    /// How many objects wait, over all channels.
    pub fn waiting(&self) -> usize {
        self.lock().queues.values().map(VecDeque::len).sum()
    }

    /// The next object of a channel.
    pub fn receive(
        &self,
        from: Rank,
        channel: &str,
        deadline: &mut Deadline<'_>,
    ) -> Result<Body, CommError> {
        self.receive_watching(from, channel, &[], deadline)
    }

    /// Like [`Self::receive`], and fails as well when a rank of `watched` fails.
    pub(crate) fn receive_watching(
        &self,
        from: Rank,
        channel: &str,
        watched: &[Rank],
        deadline: &mut Deadline<'_>,
    ) -> Result<Body, CommError> {
        let key = (from, channel.to_owned());
        let mut state = self.lock();
        loop {
            if let Some(body) = state.take(&key) {
                return Ok(body);
            }
            state.check(&key, watched)?;
            drop(state);
            let slice = deadline.next_slice(from, "object")?;
            let this = thread::current().id();
            self.lock().reading.push(this);
            let mut look = || {
                if self.lock().is_unmoved(&key, watched) {
                    Observation::Idle
                } else {
                    Observation::Done
                }
            };
            let read = deadline.read_until(slice, &mut look);
            state = self.lock();
            state.reading.retain(|thread| *thread != this);
            if !read && state.is_unmoved(&key, watched) {
                state.asleep += 1;
                let (guard, _) = self
                    .changed
                    .wait_timeout(state, slice)
                    .unwrap_or_else(PoisonError::into_inner);
                state = guard;
                state.asleep -= 1;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn take(&mut self, key: &(Rank, String)) -> Option<Body> {
        let queue = self.queues.get_mut(key)?;
        let body = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(key);
        }
        if let (Some(body), Some(waiting)) = (&body, self.waiting.get_mut(&key.0)) {
            waiting.objects -= 1;
            waiting.bytes -= bytes_of(body);
        }
        body
    }

    /// Nothing has come between the last look and taking the lock again.
    fn is_unmoved(&self, key: &(Rank, String), watched: &[Rank]) -> bool {
        !self.queues.contains_key(key) && self.check(key, watched).is_ok()
    }

    fn check(&self, key: &(Rank, String), watched: &[Rank]) -> Result<(), CommError> {
        let (from, _) = key;
        if self.closed {
            return Err(CommError::Closed);
        }
        if let Some(channel) = self.overflown.get(from) {
            return Err(CommError::Overflow {
                rank: *from,
                channel: channel.clone(),
                capacity: CAPACITY,
                capacity_bytes: CAPACITY_BYTES,
            });
        }
        if let Some(loss) = self.lost.get(from) {
            return Err(CommError::PeerLost {
                rank: *from,
                loss: loss.clone(),
            });
        }
        for rank in watched {
            match self.lost.get(rank) {
                // A watched rank that left in good order had done its part.
                None | Some(Loss::Left(None)) => {}
                Some(loss) => {
                    return Err(CommError::PeerLost {
                        rank: *rank,
                        loss: loss.clone(),
                    });
                }
            }
        }
        Ok(())
    }
}

/// Waits until every rank of `group` has called this with the same name.
pub(crate) fn barrier(
    transport: &dyn Transport,
    plane: &ObjectPlane,
    group: &[Rank],
    name: &str,
    deadline: &mut Deadline<'_>,
) -> Result<(), CommError> {
    let own = transport.rank();
    let channel = format!("\0barrier:{name}");
    let leader = *group.iter().min().unwrap_or(&own);
    let others = || group.iter().copied().filter(|rank| *rank != own);
    if own != leader {
        send_plain(transport, leader, &channel, Value::None)?;
        let verdict = plane.receive_watching(leader, &channel, group, deadline)?;
        return read_verdict(&verdict.value);
    }
    for rank in others() {
        if let Err(error) = plane.receive_watching(rank, &channel, group, deadline) {
            for rank in others() {
                // A member that is lost itself needs no telling; the first error is the one to report.
                if let Err(lost) = send_plain(transport, rank, &channel, verdict(transport, &error))
                {
                    tracing::debug!(%rank, %lost, "a member of a failed barrier was not told");
                }
            }
            return Err(error);
        }
    }
    for rank in others() {
        send_plain(transport, rank, &channel, Value::None)?;
    }
    Ok(())
}

fn send_plain(
    transport: &dyn Transport,
    to: Rank,
    channel: &str,
    value: Value,
) -> Result<(), CommError> {
    let body = Body {
        value,
        tensors: Vec::new(),
    };
    let object = ObjectMessage {
        channel: channel.to_owned(),
        body,
    };
    transport.send(to, Message::Object(Box::new(object)))
}

fn verdict(transport: &dyn Transport, error: &CommError) -> Value {
    let (rank, message) = match error {
        CommError::PeerLost { rank, loss } => (*rank, describe_loss(loss)),
        other => (transport.rank(), other.to_string()),
    };
    let host = transport
        .peer(rank)
        .map(|peer| peer.host.clone())
        .unwrap_or_default();
    Value::Tuple(vec![
        Value::Int(i64::from(rank.0)),
        Value::Str(host),
        Value::Str(message),
    ])
}

fn read_verdict(value: &Value) -> Result<(), CommError> {
    let Value::Tuple(fields) = value else {
        return Ok(());
    };
    let [Value::Int(rank), Value::Str(host), Value::Str(message)] = fields.as_slice() else {
        return Ok(());
    };
    Err(CommError::Interrupted {
        report: Box::new(ErrorReport {
            rank: Rank(u32::try_from(*rank).unwrap_or_default()),
            host: host.clone(),
            module: None,
            microbatch: None,
            phase: None,
            kind: "BarrierFailed".to_owned(),
            message: message.clone(),
            traceback: String::new(),
        }),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn nothing_is_received_past_an_object_that_found_no_room() {
        let plane = ObjectPlane::default();
        let push_on = |channel: String, number| {
            let body = Body {
                value: Value::Int(number),
                tensors: vec![],
            };
            plane.push(Rank(1), ObjectMessage { channel, body });
        };
        let push = |number| push_on("a".to_owned(), number);
        let take = || {
            let mut go_on = || true;
            let mut deadline = Deadline::new(Some(Duration::from_mins(1)), &mut go_on);
            plane.receive(Rank(1), "a", &mut deadline)
        };
        let capacity = i64::try_from(CAPACITY).unwrap();
        (0..=capacity).for_each(push);
        assert_eq!(take().unwrap().value, Value::Int(0));
        push(capacity + 1);
        push_on("b".to_owned(), 7);
        for number in 1..capacity {
            assert_eq!(take().unwrap().value, Value::Int(number));
        }
        let found = take().unwrap_err();
        assert!(
            matches!(found, CommError::Overflow { rank: Rank(1), .. }),
            "{found}"
        );
    }

    #[test]
    fn channels_do_not_add_to_what_one_sender_may_leave_waiting() {
        let plane = ObjectPlane::default();
        let push = |from, number: usize| {
            let body = Body {
                value: Value::None,
                tensors: vec![],
            };
            let channel = format!("channel {number}");
            plane.push(from, ObjectMessage { channel, body });
        };
        (0..2 * CAPACITY).for_each(|number| push(Rank(1), number));
        assert_eq!(plane.waiting(), CAPACITY);
        push(Rank(2), 0);
        assert_eq!(plane.waiting(), CAPACITY + 1, "another sender's has room");
        let mut go_on = || true;
        let mut deadline = Deadline::new(Some(Duration::from_mins(1)), &mut go_on);
        let found = plane.receive(Rank(1), "any", &mut deadline).unwrap_err();
        assert!(
            matches!(&found, CommError::Overflow { channel, .. } if *channel == format!("channel {CAPACITY}")),
            "{found}"
        );
    }
}
