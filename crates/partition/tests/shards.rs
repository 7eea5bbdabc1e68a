//! Laws of dividing parameters over ranks.

use proptest::prelude::*;
use shardwright_partition::{Shard, ShardItem, shards};

fn items(splittable: impl Strategy<Value = bool> + Clone) -> impl Strategy<Value = Vec<ShardItem>> {
    let numel = prop_oneof![
        Just(0),
        Just(1),
        1..20_u64,
        1..5_000_u64,
        60_000..200_000_u64
    ];
    let item = (
        numel,
        prop_oneof![Just(2_u64), Just(4), Just(8)],
        splittable,
    );
    let item = item.prop_map(|(numel, element_bytes, splittable)| ShardItem {
        numel,
        element_bytes,
        splittable,
    });
    prop::collection::vec(item, 0..30)
}

fn bytes(item: &ShardItem) -> u64 {
    item.numel * item.element_bytes
}

fn totals(items: &[ShardItem], found: &[Shard], before: &[u64]) -> Vec<u64> {
    let mut loads = before.to_vec();
    for shard in found {
        loads[shard.owner] += (shard.stop - shard.start) * items[shard.item].element_bytes;
    }
    loads
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn every_element_has_one_owner_and_nothing_whole_is_cut(
        items in items(any::<bool>()),
        loads in prop::collection::vec(0..100_000_u64, 1..9),
    ) {
        let found = shards(&items, &loads);
        let mut next = found.iter().peekable();
        for (index, item) in items.iter().enumerate() {
            let mut position = 0;
            let mut parts = 0;
            while let Some(shard) = next.next_if(|shard| shard.item == index) {
                prop_assert_eq!(shard.start, position);
                prop_assert!(shard.start < shard.stop || item.numel == 0);
                prop_assert!(shard.owner < loads.len());
                position = shard.stop;
                parts += 1;
            }
            prop_assert_eq!(position, item.numel);
            prop_assert!(parts == 1 || item.splittable && parts > 0);
        }
        prop_assert!(next.peek().is_none());
        prop_assert_eq!(&found, &shards(&items, &loads));
    }

    #[test]
    fn shares_of_what_can_be_split_are_within_a_twentieth_of_the_even_one(
        items in items(Just(true)),
        ranks in 1..9_usize,
    ) {
        let found = shards(&items, &vec![0; ranks]);
        let total: u64 = items.iter().map(bytes).sum();
        let even = total / ranks as u64;
        let largest = items.iter().map(|item| item.element_bytes).max().unwrap_or(0);
        for load in totals(&items, &found, &vec![0; ranks]) {
            prop_assert!(load.abs_diff(even) <= even / 20 + largest + 1, "{load} of {even}");
        }
        prop_assert!(found.len() < items.len() + ranks, "more cuts than borders");
    }

    #[test]
    fn a_rank_gets_each_parameter_once(items in items(any::<bool>()), ranks in 1..9_usize) {
        let found = shards(&items, &vec![0; ranks]);
        let mut pairs: Vec<(usize, usize)> = found.iter().map(|one| (one.item, one.owner)).collect();
        pairs.sort_unstable();
        pairs.dedup();
        prop_assert_eq!(pairs.len(), found.len());
    }

    #[test]
    fn what_ranks_have_already_is_evened_out(
        items in items(Just(true)),
        loads in prop::collection::vec(0..1_000_000_u64, 1..9),
    ) {
        let found = shards(&items, &loads);
        let after = totals(&items, &found, &loads);
        let highest = after.iter().copied().max().unwrap_or_default();
        let least = after.iter().copied().min().unwrap_or_default();
        for (rank, &load) in after.iter().enumerate() {
            if load > loads[rank] {
                let allowed = highest / 20 + 16;
                prop_assert!(load - least <= allowed, "rank {rank} got more than it needed: {after:?}");
            }
        }
    }

    #[test]
    fn whole_parameters_differ_by_no_more_than_the_largest(
        items in items(Just(false)),
        ranks in 1..9_usize,
    ) {
        let after = totals(&items, &shards(&items, &vec![0; ranks]), &vec![0; ranks]);
        let (least, most) = (after.iter().min().copied(), after.iter().max().copied());
        let largest = items.iter().map(bytes).max().unwrap_or_default();
        prop_assert!(most.unwrap_or_default() - least.unwrap_or_default() <= largest);
    }

    #[test]
    fn the_order_of_whole_parameters_does_not_change_the_loads(
        (items, other) in items(Just(false)).prop_flat_map(|items| (Just(items.clone()), Just(items).prop_shuffle())),
        ranks in 1..9_usize,
    ) {
        let loads = |items: &[ShardItem]| totals(items, &shards(items, &vec![0; ranks]), &vec![0; ranks]);
        prop_assert_eq!(loads(&items), loads(&other));
    }
}

#[test]
fn large_parameters_are_cut_where_vectors_end() {
    let item = ShardItem {
        numel: 100_003,
        element_bytes: 8,
        splittable: true,
    };
    for shard in shards(&[item], &[0; 3]) {
        assert_eq!(shard.start % 64, 0);
    }
}

#[test]
fn a_border_near_the_end_of_a_parameter_is_moved_there() {
    let item = |numel| ShardItem {
        numel,
        element_bytes: 4,
        splittable: true,
    };
    let found = shards(&[item(1_010), item(990)], &[0, 0]);
    assert_eq!(
        found.iter().map(|one| one.owner).collect::<Vec<_>>(),
        [0, 1]
    );
}

#[test]
fn more_ranks_than_elements_leave_some_without_any() {
    let item = ShardItem {
        numel: 1,
        element_bytes: 8,
        splittable: true,
    };
    assert_eq!(shards(&[item, item], &[0; 4]).len(), 2);
    assert!(shards(&[item], &[]).is_empty());
}
