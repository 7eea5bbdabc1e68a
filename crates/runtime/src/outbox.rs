//! Messages on their way to the transport: those for one rank leave in the order in which the machine decided them.

use shardwright_core::Rank;
use shardwright_wire::Message;

/// Messages decided and not yet handed to the transport, and the ranks that a thread is sending to.
///
/// Threads send without the server's lock. If each sent its own messages, one that is not scheduled for a moment would
/// be overtaken by the next (EX-13). So a rank's messages have one sender at a time: what comes for it
/// meanwhile stays here, and goes with that sender's next batch. Nobody waits for anybody.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    waiting: Vec<(Rank, Message)>,
    sending_to: Vec<Rank>,
}

impl Outbox {
    pub(crate) fn push(&mut self, to: Rank, message: Message) {
        self.waiting.push((to, message));
    }

    /// The messages for ranks that nobody sends to; the caller sends them, in this order, and then calls [`Self::sent`].
    pub(crate) fn take(&mut self) -> Vec<(Rank, Message)> {
        let (busy, free): (Vec<_>, Vec<_>) = std::mem::take(&mut self.waiting)
            .into_iter()
            .partition(|(to, _)| self.sending_to.contains(to));
        self.waiting = busy;
        self.sending_to.extend(free.iter().map(|(to, _)| *to));
        free
    }

    /// The batch for these ranks is with the transport.
    pub(crate) fn sent(&mut self, ranks: &[Rank]) {
        self.sending_to.retain(|to| !ranks.contains(to));
    }

    /// Whether all messages are with the transport.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.sending_to.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use shardwright_core::StepEpoch;
    use shardwright_wire::StepBegin;

    use super::*;

    fn message(step: u64) -> Message {
        Message::StepBegin(StepBegin {
            step: StepEpoch(step),
            function: "train".to_owned(),
            num_microbatches: 1,
            one_at_a_time: false,
        })
    }

    fn steps(batch: &[(Rank, Message)]) -> Vec<(u32, u64)> {
        batch
            .iter()
            .map(|(to, message)| match message {
                Message::StepBegin(begin) => (to.0, begin.step.0),
                other => panic!("{other:?}"),
            })
            .collect()
    }

    #[test]
    fn messages_for_a_rank_wait_for_its_sender_and_go_in_order() {
        let mut outbox = Outbox::default();
        outbox.push(Rank(1), message(1));
        outbox.push(Rank(2), message(2));
        outbox.push(Rank(1), message(3));
        assert_eq!(steps(&outbox.take()), [(1, 1), (2, 2), (1, 3)]);

        outbox.push(Rank(1), message(4));
        outbox.push(Rank(3), message(5));
        assert_eq!(
            steps(&outbox.take()),
            [(3, 5)],
            "ranks 1 and 2 have a sender"
        );
        outbox.sent(&[Rank(3)]);
        outbox.push(Rank(1), message(6));
        assert!(outbox.take().is_empty());

        outbox.sent(&[Rank(1), Rank(2)]);
        assert_eq!(steps(&outbox.take()), [(1, 4), (1, 6)]);
        assert!(!outbox.is_empty(), "they are under way");
        outbox.sent(&[Rank(1)]);
        assert!(outbox.is_empty());
    }
}
