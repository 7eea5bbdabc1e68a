//! The object plane: whoever waits is woken, and barriers part nobody.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use shardwright_core::Rank;
use shardwright_wire::{ErrorReport, Message, Value};

use super::object;
use crate::deadline::Deadline;
use crate::error::CommError;
use crate::objects::{ObjectPlane, barrier};
use crate::transport::{CommStats, HeartbeatState, Loss, PeerInfo, Transport};
use shardwright_system::sync::{explore, on_threads, with};

fn receive(plane: &ObjectPlane, from: u32, channel: &str) -> Result<i64, CommError> {
    let mut go_on = || true;
    let mut deadline = Deadline::new(None, &mut go_on);
    let got = plane.receive(Rank(from), channel, &mut deadline)?;
    match got.value {
        Value::Int(number) => Ok(number),
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_object_wakes_its_receiver_and_objects_keep_their_order() {
    explore(15_000, || {
        let plane = Arc::new(ObjectPlane::default());
        let sender = |rank: u32| {
            with(&plane, move |plane| {
                for number in 0..3 {
                    plane.push(Rank(rank), object("a", number));
                }
            })
        };
        let receiver = |rank: u32| {
            with(&plane, move |plane| {
                for number in 0..3 {
                    assert_eq!(receive(plane, rank, "a").unwrap(), number);
                }
            })
        };
        on_threads([sender(1), receiver(2), sender(2), receiver(1)]);
        assert_eq!(plane.waiting(), 0);
    });
}

#[test]
fn every_waiting_receiver_hears_of_the_end_whatever_it_is() {
    explore(15_000, || {
        for end in [ObjectPlane::close as fn(&ObjectPlane), |plane| {
            plane.peer_lost(Rank(1), Loss::Died);
        }] {
            let plane = Arc::new(ObjectPlane::default());
            let receiver = || {
                with(&plane, |plane| {
                    receive(plane, 1, "a").unwrap_err();
                })
            };
            on_threads([receiver(), with(&plane, end), receiver()]);
        }
    });
}

/// Ranks whose objects are at their receivers' at once.
struct Planes {
    own: Rank,
    planes: Arc<BTreeMap<Rank, ObjectPlane>>,
}

impl Transport for Planes {
    fn rank(&self) -> Rank {
        self.own
    }

    fn world(&self) -> u32 {
        self.planes.len() as u32
    }

    fn send(&self, to: Rank, message: Message) -> Result<(), CommError> {
        let Message::Object(object) = message else {
            panic!("barriers send objects");
        };
        self.planes[&to].push(self.own, *object);
        Ok(())
    }

    fn peer(&self, _: Rank) -> Option<&PeerInfo> {
        None
    }

    fn heartbeat_state(&self) -> &Arc<HeartbeatState> {
        static HEARTBEAT_STATE: OnceLock<Arc<HeartbeatState>> = OnceLock::new();
        HEARTBEAT_STATE.get_or_init(Arc::default)
    }

    fn close(&self, _: Option<ErrorReport>) {}

    fn stats(&self) -> CommStats {
        CommStats::default()
    }
}

#[test]
fn nobody_passes_a_barrier_before_all_have_reached_it() {
    explore(10_000, || {
        let group: Vec<Rank> = (0..3).map(Rank).collect();
        let planes = group.iter().map(|rank| (*rank, ObjectPlane::default()));
        let planes: Arc<BTreeMap<_, _>> = Arc::new(planes.collect());
        let reached = Arc::new(AtomicU32::new(0));
        on_threads(group.iter().map(|rank| {
            let transport = Planes {
                own: *rank,
                planes: Arc::clone(&planes),
            };
            let group = group.clone();
            with(&reached, move |reached| {
                for round in 1..=2 {
                    reached.fetch_add(1, Ordering::SeqCst);
                    let mut go_on = || true;
                    let mut deadline = Deadline::new(None, &mut go_on);
                    let plane = &transport.planes[&transport.own];
                    barrier(&transport, plane, &group, "all", &mut deadline).unwrap();
                    assert!(reached.load(Ordering::SeqCst) >= 3 * round);
                }
            })
        }));
    });
}

#[test]
fn nobody_hangs_at_a_barrier_that_a_rank_does_not_reach() {
    explore(10_000, || {
        let group: Vec<Rank> = (0..3).map(Rank).collect();
        let planes = group.iter().map(|rank| (*rank, ObjectPlane::default()));
        let planes: Arc<BTreeMap<_, _>> = Arc::new(planes.collect());
        let member = |rank: u32| {
            let transport = Planes {
                own: Rank(rank),
                planes: Arc::clone(&planes),
            };
            let group = group.clone();
            Box::new(move || {
                let mut go_on = || true;
                let mut deadline = Deadline::new(None, &mut go_on);
                let plane = &transport.planes[&transport.own];
                barrier(&transport, plane, &group, "all", &mut deadline).unwrap_err();
            }) as Box<dyn FnOnce() + Send>
        };
        let dying = with(&planes, |planes| {
            // The others hear of it from the barrier's first rank.
            planes[&Rank(0)].peer_lost(Rank(2), Loss::Died);
        });
        on_threads([member(0), dying, member(1)]);
    });
}
