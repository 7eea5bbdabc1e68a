//! The router and what is published: nothing is lost, nothing is overtaken, nothing is kept for ever.

use std::sync::{Arc, PoisonError};

use shardwright_core::{Rank, StepEpoch};
use shardwright_wire::{ForwardOver, Heartbeat, Message};

use super::body;
use crate::published::Published;
use crate::router::Router;
use crate::transport::{Loss, Receiver};
use shardwright_system::sync::{Mutex, explore, on_threads, with};

#[derive(Default)]
struct Heard(Mutex<Vec<(Rank, Option<u64>)>>);

impl Heard {
    fn push(&self, from: Rank, step: Option<u64>) {
        let mut heard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        heard.push((from, step));
    }
}

impl Receiver for Heard {
    fn deliver(&self, from: Rank, message: Message) {
        let Message::ForwardOver(over) = message else {
            panic!("{message:?}");
        };
        self.push(from, Some(over.step.0));
    }

    fn peer_lost(&self, from: Rank, _: Loss) {
        self.push(from, None);
    }

    fn heartbeat(&self, _: Rank, _: Heartbeat) {}
}

fn message(step: u64) -> Message {
    Message::ForwardOver(ForwardOver {
        step: StepEpoch(step),
        microbatch: shardwright_core::MicrobatchId(0),
    })
}

#[test]
fn a_late_handler_hears_all_of_each_peer_in_order_and_its_loss_last() {
    explore(15_000, || {
        let router = Arc::new(Router::default());
        let heard = Arc::new(Heard::default());
        let peer = |rank: u32| {
            with(&router, move |router| {
                for step in 0..3 {
                    router.deliver(Rank(rank), message(step));
                }
                router.peer_lost(Rank(rank), Loss::Died);
            })
        };
        let handler = Arc::clone(&heard);
        let ready = with(&router, move |router| router.set_handler(handler));
        on_threads([peer(1), ready, peer(2)]);
        let heard = heard.0.lock().unwrap();
        for rank in [1, 2] {
            let of_rank = heard.iter().filter(|(from, _)| from.0 == rank);
            let steps: Vec<_> = of_rank.map(|(_, step)| *step).collect();
            assert_eq!(steps, [Some(0), Some(1), Some(2), None], "CM-2, CM-3");
        }
    });
}

#[test]
fn what_is_published_is_kept_for_nobody_who_is_gone() {
    explore(15_000, || {
        let published = Arc::new(Published::default());
        let lost = with(&published, |published| published.peer_lost(Rank(1)));
        let takes = with(&published, |published| {
            let key = published.publish(body(1), [Rank(2)]);
            let question = shardwright_wire::ObjectMessage {
                channel: "\0fetch".to_owned(),
                body: body(key),
            };
            assert_eq!(published.answer(Rank(2), question), None);
        });
        let keeps = with(&published, |published| {
            published.publish(body(7), [Rank(1)]);
        });
        on_threads([lost, keeps, takes]);
        assert_eq!(published.len(), 0);
    });
}
