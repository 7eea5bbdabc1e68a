//! Laws of chains: whoever runs a call of one knows the next, and nothing gets lost on the way.

use proptest::option;
use proptest::prelude::*;
use shardwright_core::{CallId, ModuleId, Rank, RequestId};
use shardwright_wire::{
    ArgumentNotes, BackwardLink, Checkpointing, ForwardCall, ForwardLink, Gradients,
    UnknownGradient, Work, WorkKind, next_backward,
};

fn forward_chain() -> impl Strategy<Value = Vec<ForwardLink>> {
    prop::collection::vec(any::<(u32, u64, u32, u32, u64)>(), 0..6).prop_map(|links| {
        let links = links.into_iter();
        links
            .map(|(rank, request, module, call, seed)| ForwardLink {
                rank: Rank(rank),
                request: RequestId(request),
                module: ModuleId(module),
                range: None,
                call: CallId(call),
                seed,
            })
            .collect()
    })
}

fn backward_links(same: bool) -> impl Strategy<Value = Vec<BackwardLink>> {
    let results = prop::collection::vec(any::<u32>(), 4);
    prop::collection::vec((any::<(u32, u64, u32, u64, u32)>(), results), 1..6).prop_map(
        move |links| {
            let links = links.into_iter();
            links
                .map(
                    |((rank, request, module, forward, call), results)| BackwardLink {
                        rank: Rank(rank),
                        request: RequestId(request),
                        module: ModuleId(module),
                        forward: RequestId(forward),
                        call: CallId(call),
                        results: (!same).then(|| (0..4).zip(results).collect()),
                    },
                )
                .collect()
        },
    )
}

fn gradients() -> impl Strategy<Value = Gradients> {
    prop::collection::vec((0_u32..4, any::<u32>()), 0..4)
}

proptest! {
    #[test]
    fn every_call_of_a_chain_is_made_once_in_order_under_the_first_ones_state(
        chain in forward_chain(), checkpointing in option::of(any::<(bool, bool, u32)>()), stops in 0_usize..8
    ) {
        let mut call = ForwardCall::new(ModuleId(0));
        call.chain.clone_from(&chain);
        call.context.checkpointing =
            checkpointing.map(|(isolated, preserves_rng_state, group)| Checkpointing {
                isolated,
                preserves_rng_state,
                group,
            });
        let mut made = Vec::new();
        let notes = || ArgumentNotes { private: true, ..ArgumentNotes::default() };
        while let Some((link, next)) = if made.len() < stops { call.next(notes()) } else { call.next_stopped() } {
            prop_assert_eq!((next.module, next.range, next.seed), (link.module, link.range, link.seed));
            prop_assert_eq!(&next.context, &call.context);
            // Once a chain has ended, nothing of it runs any more.
            prop_assert_eq!(next.stopped, made.len() >= stops);
            prop_assert_eq!(next.notes.private, made.len() < stops);
            made.push(link);
            call = next;
        }
        prop_assert_eq!(made, chain);
    }

    #[test]
    fn gradients_go_back_through_a_chain_under_the_numbers_of_their_results(
        chain in backward_links(false), gradients in gradients()
    ) {
        let (link, work) = next_backward(&chain, gradients.clone()).unwrap().unwrap();
        prop_assert_eq!(&link, &chain[0]);
        prop_assert_eq!((work.module(), work.forward()), (Some(link.module), Some(link.forward)));
        let results = link.results.unwrap();
        let expected: Gradients = gradients
            .into_iter()
            .map(|(argument, tensor)| (results[argument as usize].1, tensor))
            .collect();
        match work {
            Work::Backward(call) => {
                prop_assert!(!expected.is_empty());
                prop_assert_eq!(&call.gradients, &expected);
                prop_assert_eq!(&call.chain, &chain[1..]);
            }
            Work::Close(call) => {
                prop_assert!(expected.is_empty(), "what has gradients is no close");
                prop_assert_eq!(&call.chain, &chain[1..]);
            }
            other => prop_assert!(false, "{other:?} follows a backward"),
        }
    }

    #[test]
    fn a_link_without_numbers_of_its_own_keeps_them(chain in backward_links(true), gradients in gradients()) {
        let (_, work) = next_backward(&chain, gradients.clone()).unwrap().unwrap();
        if let Work::Backward(call) = &work {
            prop_assert_eq!(&call.gradients, &gradients);
        }
        prop_assert_eq!(work.kind() == WorkKind::Close, gradients.is_empty());
    }

    #[test]
    fn a_gradient_of_no_result_is_refused(chain in backward_links(false), argument in 4_u32.., tensor in any::<u32>()) {
        let next = next_backward(&chain, vec![(argument, tensor)]).unwrap();
        prop_assert_eq!(next.unwrap_err(), UnknownGradient { argument });
    }
}

#[test]
fn nothing_follows_the_last() {
    assert_eq!(
        ForwardCall::new(ModuleId(0)).next(ArgumentNotes::default()),
        None
    );
    assert_eq!(ForwardCall::new(ModuleId(0)).next_stopped(), None);
    assert_eq!(next_backward(&[], vec![(0, 0)]), None);
}
