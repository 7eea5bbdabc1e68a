//! Sends what arrives on its way: objects to the object plane, the rest to the
//! handler. What comes before there is a handler is kept for it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, PoisonError};

use shardwright_core::Rank;
use shardwright_wire::{Heartbeat, Message};

use crate::objects::ObjectPlane;
use crate::published::Published;
use crate::transport::{Loss, Receiver, Transport};
use shardwright_system::sync::{Mutex, MutexGuard};

/// How many messages are kept for a handler that is not there yet: more than
/// any step's opening, small enough that a rank that never sets one notices.
pub(crate) const KEPT_CAPACITY: usize = 65_536;

/// The receiver of a node.
#[derive(Default)]
pub struct Router {
    objects: ObjectPlane,
    published: Published,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    handler: Option<Arc<dyn Receiver>>,
    kept: VecDeque<(Rank, Kept)>,
    lost: BTreeMap<Rank, Loss>,
}

enum Kept {
    Message(Message),
    Lost(Loss),
}

impl Router {
    /// Lets what arrives be answered, and threads be woken that receive by themselves.
    pub fn connect(&self, transport: &Arc<dyn Transport>) {
        self.objects.connect(transport);
        self.published.connect(transport);
    }

    /// Where objects arrive.
    pub(crate) fn objects(&self) -> &ObjectPlane {
        &self.objects
    }

    /// What this rank keeps for others to fetch.
    pub(crate) fn published(&self) -> &Published {
        &self.published
    }

    /// Hands everything but objects to `handler` from now on, and what was kept
    /// at once. The handler must not call the router while it takes those.
    pub fn set_handler(&self, handler: Arc<dyn Receiver>) {
        let mut state = self.lock();
        while let Some((from, kept)) = state.kept.pop_front() {
            match kept {
                Kept::Message(message) => handler.deliver(from, message),
                Kept::Lost(loss) => handler.peer_lost(from, loss),
            }
        }
        state.handler = Some(handler);
    }

    /// The connection is closed: who waits for an object hears of it, and nothing is kept any more. The handler goes
    /// too, which may hold the connection, which holds this.
    pub fn close(&self) {
        self.objects.close();
        self.published.close();
        let mut state = self.lock();
        let gone = (state.handler.take(), std::mem::take(&mut state.kept));
        drop(state);
        drop(gone);
    }

    /// The peers that are gone, and how.
    pub fn lost(&self) -> BTreeMap<Rank, Loss> {
        self.lock().lost.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Receiver for Router {
    fn deliver(&self, from: Rank, message: Message) {
        if let Message::Object(object) = message {
            if let Some(object) = self.published.answer(from, *object) {
                self.objects.push(from, object);
            }
            return;
        }
        let mut state = self.lock();
        if let Some(handler) = state.handler.clone() {
            drop(state);
            handler.deliver(from, message);
        } else if state.kept.len() < KEPT_CAPACITY {
            state.kept.push_back((from, Kept::Message(message)));
        } else if !state.lost.contains_key(&from) {
            let reason =
                format!("more than {KEPT_CAPACITY} messages before this rank was ready for any");
            tracing::warn!(rank = %from, %reason, "messages dropped");
            drop(state);
            self.peer_lost(from, Loss::Broken { reason });
        }
    }

    fn peer_lost(&self, from: Rank, loss: Loss) {
        self.objects.peer_lost(from, loss.clone());
        self.published.peer_lost(from);
        let mut state = self.lock();
        state.lost.entry(from).or_insert_with(|| loss.clone());
        if let Some(handler) = state.handler.clone() {
            drop(state);
            handler.peer_lost(from, loss);
        } else {
            state.kept.push_back((from, Kept::Lost(loss)));
        }
    }

    fn heartbeat(&self, from: Rank, heartbeat: Heartbeat) {
        let handler = self.lock().handler.clone();
        if let Some(handler) = handler {
            handler.heartbeat(from, heartbeat);
        }
    }
}
