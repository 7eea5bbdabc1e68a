use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const PLACEMENTS: [&str; 8] = [
    "cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD",
];

fn topology(world: u32, pipeline: u32, tensor: u32, placement: &str) -> Topology {
    let placement = placement.parse().expect("a placement");
    Topology::new(world, pipeline, tensor, &placement).expect("a topology")
}

fn groups(topology: &Topology, group: Group) -> Vec<Vec<u32>> {
    let groups = topology.groups(group);
    let numbers = |members: Vec<Rank>| members.into_iter().map(|rank| rank.0).collect();
    groups.into_iter().map(numbers).collect()
}

fn triple(topology: &Topology, rank: u32) -> (u32, u32, u32) {
    let at = topology.coordinates(Rank(rank)).expect("a rank of the job");
    (at.reduced_data, at.pipeline, at.tensor)
}

#[test]
fn cluster_keeps_the_stages_of_a_pipeline_together() {
    let topology = topology(8, 2, 1, "cluster");
    let replicas = [[0, 1], [2, 3], [4, 5], [6, 7]];
    assert_eq!(groups(&topology, Group::ModelParallel), replicas);
    let stages = [[0, 2, 4, 6], [1, 3, 5, 7]];
    assert_eq!(groups(&topology, Group::DataParallel), stages);
}

#[test]
fn spread_keeps_the_replicas_of_a_stage_together() {
    let topology = topology(8, 2, 1, "spread");
    let replicas = [[0, 4], [1, 5], [2, 6], [3, 7]];
    assert_eq!(groups(&topology, Group::ModelParallel), replicas);
    let stages = [[0, 1, 2, 3], [4, 5, 6, 7]];
    assert_eq!(groups(&topology, Group::DataParallel), stages);
}

#[test]
fn the_right_most_letter_varies_fastest() {
    let cluster = topology(8, 2, 2, "DPT");
    let expected = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0)];
    for (rank, expected) in (0..).zip(expected) {
        assert_eq!(triple(&cluster, rank), expected);
    }
    let other = topology(8, 2, 2, "PTD");
    assert_eq!(triple(&other, 1), (1, 0, 0));
    assert_eq!(triple(&other, 2), (0, 0, 1));
    assert_eq!(triple(&other, 4), (0, 1, 0));
}

#[test]
fn members_of_every_group_ascend_also_when_pipeline_varies_slowest() {
    let topology = topology(8, 2, 2, "PTD");
    assert_eq!(topology.rank_in(Group::ModelParallel, Rank(4)), Ok(2));
    assert_eq!(topology.rank_in(Group::DataParallel, Rank(6)), Ok(2));
    let members = topology.members(Group::ModelParallel, Rank(3));
    assert_eq!(members, Ok(vec![Rank(1), Rank(3), Rank(5), Rank(7)]));
}

#[test]
fn other_strategies_are_refused() {
    for text in ["", "DP", "DPTT", "DDP", "dpt", "Cluster", "DPX"] {
        let refused = text.parse::<Placement>();
        assert_eq!(refused, Err(TopologyError::Placement(text.to_owned())));
    }
}

#[test]
fn a_world_of_broken_replicas_is_refused() {
    let refused = Topology::new(6, 2, 2, &Placement::CLUSTER).expect_err("6 is no multiple of 4");
    let text = refused.to_string();
    assert!(
        text.contains("6 is not divisible") && text.contains("2 * 2"),
        "{text}"
    );
    for sizes in [(0, 1, 1), (1, 0, 1), (1, 1, 0), (8, u32::MAX, 2)] {
        assert!(Topology::new(sizes.0, sizes.1, sizes.2, &Placement::CLUSTER).is_err());
    }
}

#[test]
fn a_rank_outside_is_refused_by_name() {
    let topology = topology(4, 2, 1, "cluster");
    let refused = topology.coordinates(Rank(4)).expect_err("ranks end at 3");
    assert_eq!(
        refused.to_string(),
        "rank 4 does not exist; allowed: 0 to 3"
    );
    let refused = topology.global_rank(Group::PipelineParallel, Rank(0), 2);
    let text = refused.expect_err("stages end at 1").to_string();
    assert_eq!(text, "pp_rank 2 does not exist; allowed: 0 to 1");
}

proptest! {
    #[test]
    fn the_identities_of_the_groups_hold(
        reduced in 1_u32..5, pipeline in 1_u32..5, tensor in 1_u32..5, which in 0_usize..8,
    ) {
        let world = reduced * pipeline * tensor;
        let topology = topology(world, pipeline, tensor, PLACEMENTS[which]);
        let size = |group| topology.size(group);
        prop_assert_eq!(size(Group::ModelParallel) * size(Group::ReducedDataParallel), world);
        prop_assert_eq!(size(Group::PipelineParallel) * size(Group::DataParallel), world);
        prop_assert_eq!(size(Group::TensorParallel) * size(Group::ReducedDataParallel), size(Group::DataParallel));
        if tensor == 1 {
            prop_assert_eq!(size(Group::ModelParallel) * size(Group::DataParallel), world);
        }
    }

    #[test]
    fn groups_divide_the_world_and_number_their_members(
        reduced in 1_u32..5, pipeline in 1_u32..5, tensor in 1_u32..5, which in 0_usize..8,
    ) {
        let world = reduced * pipeline * tensor;
        let topology = topology(world, pipeline, tensor, PLACEMENTS[which]);
        for group in Group::ALL {
            let groups = topology.groups(group);
            let mut seen = BTreeSet::new();
            for members in &groups {
                prop_assert_eq!(members.len(), topology.size(group) as usize);
                prop_assert!(members.is_sorted());
                for (number, &member) in (0..).zip(members) {
                    prop_assert!(seen.insert(member));
                    prop_assert_eq!(topology.rank_in(group, member), Ok(number));
                    prop_assert_eq!(&topology.members(group, member).expect("a group"), members);
                    prop_assert_eq!(topology.global_rank(group, members[0], number), Ok(member));
                }
            }
            prop_assert_eq!(seen.len(), world as usize);
        }
    }

    #[test]
    fn coordinates_lead_back_to_their_rank(
        reduced in 1_u32..5, pipeline in 1_u32..5, tensor in 1_u32..5, which in 0_usize..8,
    ) {
        let topology = topology(reduced * pipeline * tensor, pipeline, tensor, PLACEMENTS[which]);
        for rank in 0..topology.world_size() {
            let at = topology.coordinates(Rank(rank)).expect("a rank of the job");
            prop_assert_eq!(topology.rank_at(at), Ok(Rank(rank)));
        }
    }

    #[test]
    fn a_replica_is_the_union_of_the_pipelines_of_a_tensor_group(
        reduced in 1_u32..4, pipeline in 1_u32..4, tensor in 1_u32..4, which in 0_usize..8,
    ) {
        let topology = topology(reduced * pipeline * tensor, pipeline, tensor, PLACEMENTS[which]);
        let members = |group, rank| topology.members(group, rank).expect("a group");
        for rank in (0..topology.world_size()).map(Rank) {
            let union = |outer, inner| -> BTreeSet<Rank> {
                members(outer, rank).into_iter().flat_map(|peer| members(inner, peer)).collect()
            };
            let replica = union(Group::TensorParallel, Group::PipelineParallel);
            prop_assert_eq!(Vec::from_iter(replica), members(Group::ModelParallel, rank));
            let stage = union(Group::TensorParallel, Group::ReducedDataParallel);
            prop_assert_eq!(Vec::from_iter(stage), members(Group::DataParallel, rank));
        }
    }
}
