//! Bodies that this rank keeps until the peers they are meant for have fetched them
//! or said that they will not. Served by the thread that the question arrives on.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock, PoisonError, Weak};

use shardwright_core::Rank;
use shardwright_wire::{Body, Message, ObjectMessage, Value};

use crate::error::CommError;
use crate::transport::Transport;
use shardwright_system::sync::{Mutex, MutexGuard};

const FETCH: &str = "\0fetch";
const RELEASE: &str = "\0release";

/// What this rank has published and not all peers have taken.
#[derive(Default)]
pub(crate) struct Published {
    state: Mutex<State>,
    transport: OnceLock<Weak<dyn Transport>>,
}

#[derive(Default)]
struct State {
    last_key: i64,
    /// Peers that are gone: they fetch nothing.
    lost: BTreeSet<Rank>,
    kept: BTreeMap<i64, (Body, BTreeSet<Rank>)>,
}

impl Published {
    /// Gives answers their way back.
    pub(crate) fn connect(&self, transport: &Arc<dyn Transport>) {
        // A second call would bring the same transport.
        self.transport.get_or_init(|| Arc::downgrade(transport));
    }

    /// Keeps a body for `peers`; the key to ask for it by.
    pub(crate) fn publish(&self, body: Body, peers: impl IntoIterator<Item = Rank>) -> i64 {
        let mut peers: BTreeSet<Rank> = peers.into_iter().collect();
        let mut state = self.lock();
        peers.retain(|rank| !state.lost.contains(rank));
        state.last_key += 1;
        let key = state.last_key;
        if !peers.is_empty() {
            state.kept.insert(key, (body, peers));
        }
        key
    }

    /// How many bodies are kept.
    pub(crate) fn len(&self) -> usize {
        self.lock().kept.len()
    }

    /// A peer is gone: nothing is kept for it.
    pub(crate) fn peer_lost(&self, rank: Rank) {
        let mut state = self.lock();
        state.lost.insert(rank);
        state.kept.retain(|_, (_, peers)| {
            peers.remove(&rank);
            !peers.is_empty()
        });
    }

    /// Keeps nothing any more.
    pub(crate) fn close(&self) {
        let kept = std::mem::take(&mut self.lock().kept);
        drop(kept);
    }

    /// Takes an object that is a question to this rank; others come back.
    pub(crate) fn answer(&self, from: Rank, object: ObjectMessage) -> Option<ObjectMessage> {
        if object.channel != FETCH && object.channel != RELEASE {
            return Some(object);
        }
        let Value::Int(key) = object.body.value else {
            tracing::warn!(rank = %from, "a question for a published body without a key");
            return None;
        };
        let body = self.take(from, key);
        let transport = self.transport.get().and_then(Weak::upgrade);
        if let (FETCH, Some(body), Some(transport)) = (object.channel.as_str(), body, transport) {
            let reply = ObjectMessage {
                channel: channel_of(key),
                body,
            };
            if let Err(error) = transport.send(from, Message::Object(Box::new(reply))) {
                tracing::debug!(rank = %from, %error, "a published body was not delivered");
            }
        }
        None
    }

    fn take(&self, rank: Rank, key: i64) -> Option<Body> {
        let mut state = self.lock();
        let (body, peers) = state.kept.get_mut(&key)?;
        if !peers.remove(&rank) {
            return None;
        }
        let body = body.clone();
        if peers.is_empty() {
            state.kept.remove(&key);
        }
        Some(body)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The channel on which a published body arrives once it is asked for.
pub(crate) fn channel_of(key: i64) -> String {
    format!("\0fetched:{key}")
}

/// Asks a rank for what it has published under a key; it comes on [`channel_of`] the key.
pub(crate) fn fetch(transport: &dyn Transport, from: Rank, key: i64) -> Result<(), CommError> {
    ask(transport, from, FETCH, key)
}

/// Tells a rank that this one will not fetch what it has published under a key.
pub(crate) fn release(transport: &dyn Transport, from: Rank, key: i64) -> Result<(), CommError> {
    ask(transport, from, RELEASE, key)
}

fn ask(transport: &dyn Transport, to: Rank, channel: &str, key: i64) -> Result<(), CommError> {
    let body = Body {
        value: Value::Int(key),
        tensors: Vec::new(),
    };
    let question = ObjectMessage {
        channel: channel.to_owned(),
        body,
    };
    transport.send(to, Message::Object(Box::new(question)))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::deadline::Deadline;
    use crate::in_process::in_process;
    use crate::router::Router;
    use crate::transport::Receiver;

    fn body(number: i64) -> Body {
        Body {
            value: Value::Int(number),
            tensors: Vec::new(),
        }
    }

    fn ranks() -> Vec<(Arc<dyn Transport>, Arc<Router>)> {
        let routers: Vec<Arc<Router>> = (0..3).map(|_| Arc::default()).collect();
        let receivers = routers
            .iter()
            .map(|router| Arc::<Router>::clone(router) as Arc<dyn Receiver>)
            .collect();
        let transports = in_process(receivers).expect("three ranks in one process");
        let shared = transports
            .into_iter()
            .map(|transport| transport as Arc<dyn Transport>);
        let ranks: Vec<_> = shared.zip(routers).collect();
        for (transport, router) in &ranks {
            router.connect(transport);
        }
        ranks
    }

    #[test]
    fn a_body_is_kept_until_the_last_peer_has_it() {
        let ranks = ranks();
        let published = ranks[0].1.published();
        let key = published.publish(body(7), [Rank(1), Rank(2)]);
        for index in [1, 2] {
            assert_eq!(published.len(), 1);
            let (transport, router) = &ranks[index];
            fetch(&**transport, Rank(0), key).unwrap();
            let mut go_on = || true;
            let mut deadline = Deadline::new(Some(Duration::from_secs(10)), &mut go_on);
            let got = router
                .objects()
                .receive(Rank(0), &channel_of(key), &mut deadline)
                .unwrap();
            assert_eq!(got, body(7));
        }
        assert_eq!(published.len(), 0);
    }

    #[test]
    fn peers_that_release_or_die_are_not_waited_for() {
        let published = Published::default();
        published.publish(body(1), [Rank(1), Rank(2)]);
        let question = ObjectMessage {
            channel: RELEASE.to_owned(),
            body: body(1),
        };
        assert_eq!(published.answer(Rank(1), question), None);
        assert_eq!(published.len(), 1);
        published.peer_lost(Rank(2));
        assert_eq!(published.len(), 0);
    }

    #[test]
    fn other_objects_pass() {
        let object = ObjectMessage {
            channel: "objects".to_owned(),
            body: body(1),
        };
        assert_eq!(
            Published::default().answer(Rank(1), object.clone()),
            Some(object)
        );
    }
}
