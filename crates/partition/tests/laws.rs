//! Laws that hold for every model, and oracles that are too slow or too plain to be the library.

mod common;

use std::collections::BTreeSet;

use common::drawn::{any_model, containers};
use common::{Model, ROOT};
use proptest::prelude::*;
use shardwright_core::{ModuleId, PipelineRank};
use shardwright_partition::{Claim, PartitionDecision, PartitionRequest, dhondt, segments};

/// All divisions of `len` elements into `num_segments` consecutive segments, by their ends.
fn divisions(len: usize, num_segments: usize) -> Vec<Vec<usize>> {
    if num_segments == 1 {
        return vec![vec![len]];
    }
    (num_segments - 1..len)
        .flat_map(|last_start| {
            divisions(last_start, num_segments - 1)
                .into_iter()
                .map(move |mut ends| {
                    ends.push(len);
                    ends
                })
        })
        .collect()
}

fn largest(costs: &[u64], ends: &[usize]) -> u64 {
    let starts = std::iter::once(0).chain(ends.iter().copied());
    starts
        .zip(ends)
        .map(|(start, &end)| costs[start..end].iter().sum())
        .max()
        .unwrap_or(0)
}

/// Seats by sorting all quotients at once, in floating point.
fn seats_by_sorting(num_devices: usize, claims: &[Claim]) -> Vec<usize> {
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    let mut quotients: Vec<(f64, usize)> = claims
        .iter()
        .enumerate()
        .filter(|(_, claim)| claim.cost > 0)
        .flat_map(|(number, claim)| {
            (1..=claim.capacity.min(num_devices))
                .map(move |seat| (claim.cost as f64 / seat as f64, number))
        })
        .collect();
    quotients.sort_by(|left, right| right.0.total_cmp(&left.0).then(left.1.cmp(&right.1)));
    let mut seats = vec![0; claims.len()];
    for (_, number) in quotients.into_iter().take(num_devices) {
        seats[number] += 1;
    }
    seats
}

proptest! {
    #[test]
    fn segments_are_consecutive_not_empty_and_the_best_there_are(
        costs in prop::collection::vec(0_u64..50, 1..=8), wanted in 1_usize..=8,
    ) {
        let found = segments(&costs, wanted);
        prop_assert_eq!(found.len(), wanted.min(costs.len()));
        let mut next = 0;
        for segment in &found {
            prop_assert_eq!(segment.start, next);
            prop_assert!(segment.end > segment.start);
            next = segment.end;
        }
        prop_assert_eq!(next, costs.len());

        let ends: Vec<usize> = found.iter().map(|segment| segment.end).collect();
        let all = divisions(costs.len(), found.len());
        let best = all.iter().map(|ends| largest(&costs, ends)).min().expect("a division");
        prop_assert_eq!(largest(&costs, &ends), best);
        // Of the best ones, the last segment starts earliest.
        let earliest = all.iter().filter(|ends| largest(&costs, ends) == best).map(|ends| ends[..ends.len() - 1].last()).min();
        prop_assert_eq!(ends[..ends.len() - 1].last(), earliest.expect("a division"));
    }

    #[test]
    fn devices_are_won_as_by_sorting_all_quotients(
        costs in prop::collection::vec((0_u64..40, 1_usize..6), 1..=8), num_devices in 0_usize..12,
    ) {
        let claims: Vec<Claim> = costs.into_iter().map(|(cost, capacity)| Claim { cost, capacity }).collect();
        let devices: Vec<usize> = (0..num_devices).collect();
        let won = dhondt(&devices, &claims);
        let seats: Vec<usize> = won.iter().map(Vec::len).collect();
        prop_assert_eq!(&seats, &seats_by_sorting(num_devices, &claims));
        prop_assert!(won.iter().all(|devices| devices.is_sorted()));
        // The device dealt first is the first device, and none is dealt twice or left out between.
        let dealt: BTreeSet<usize> = won.iter().flatten().copied().collect();
        prop_assert_eq!(dealt, (0..seats.iter().sum()).collect());
    }

    #[test]
    fn dealing_one_more_device_takes_none_away(
        costs in prop::collection::vec(1_u64..40, 1..=6), num_devices in 1_usize..12,
    ) {
        let claims: Vec<Claim> = costs.into_iter().map(|cost| Claim { cost, capacity: usize::MAX }).collect();
        let devices: Vec<usize> = (0..=num_devices).collect();
        let (fewer, more) = (dhondt(&devices[..num_devices], &claims), dhondt(&devices, &claims));
        for (fewer, more) in fewer.iter().zip(&more) {
            prop_assert!(more.starts_with(fewer));
        }
    }
}

/// Nodes below this one that cost something, hold a parameter, and are not divided further.
fn parts(request: &PartitionRequest, decision: &PartitionDecision, node: usize) -> usize {
    let below = decision.nodes.iter().enumerate().filter(|(_, child)| {
        child.parent.is_some_and(|parent| parent.0 as usize == node) && child.cost > 0.0
    });
    let parts: usize = below
        .filter(|(child, _)| holds_parameters(request, decision, *child))
        .map(|(child, _)| parts(request, decision, child))
        .sum();
    parts.max(1)
}

fn holds_parameters(request: &PartitionRequest, decision: &PartitionDecision, node: usize) -> bool {
    let mut modules = decision.nodes[node].modules.iter();
    let below = |child: &usize| {
        decision.nodes[*child]
            .parent
            .is_some_and(|parent| parent.0 as usize == node)
    };
    modules.any(|module| !request.modules[module.0 as usize].parameters.is_empty())
        || (0..decision.nodes.len())
            .filter(below)
            .any(|child| holds_parameters(request, decision, child))
}

fn decide(request: &PartitionRequest) -> PartitionDecision {
    PartitionDecision::new(request).expect("a good request")
}

proptest! {
    #[test]
    fn every_module_has_a_device_and_every_device_its_share(drawn in any_model()) {
        let request = drawn.request;
        let decision = decide(&request);
        prop_assert_eq!(decision.modules.len(), request.modules.len());
        for module in &decision.modules {
            prop_assert!(module.pp_rank.0 < request.num_devices);
        }
        let bytes: u64 = decision.devices.iter().map(|device| device.parameter_bytes).sum();
        prop_assert_eq!(bytes, request.parameters.iter().map(|parameter| parameter.bytes).sum::<u64>());
        let modules: u64 = decision.devices.iter().map(|device| device.modules).sum();
        prop_assert_eq!(modules, request.modules.len() as u64);
        let cost: f64 = decision.devices.iter().map(|device| device.cost).sum();
        prop_assert!((cost - 1.0).abs() < 1e-9 || cost == 0.0);
        let unused: BTreeSet<PipelineRank> = decision.unused_devices.iter().copied().collect();
        for device in &decision.devices {
            prop_assert_eq!(unused.contains(&device.pp_rank), device.modules == 0);
        }
    }

    #[test]
    fn modules_that_share_a_parameter_or_are_joined_share_a_device(drawn in any_model()) {
        let request = drawn.request;
        let decision = decide(&request);
        for (module, place) in request.modules.iter().zip(&decision.modules) {
            for &parameter in &module.parameters {
                prop_assert_eq!(decision.parameter_ranks[parameter], place.pp_rank);
            }
        }
        for (first, second) in &request.joins {
            let rank = |module: &ModuleId| decision.modules[module.0 as usize].pp_rank;
            prop_assert_eq!(rank(first), rank(second));
        }
    }

    #[test]
    fn a_node_goes_to_the_smallest_of_its_devices_and_its_children_to_the_rest(drawn in any_model()) {
        let decision = decide(&drawn.request);
        let containers = containers(&drawn.request);
        for node in &decision.nodes {
            prop_assert!(node.devices.is_sorted());
            prop_assert_eq!(node.pp_rank, node.devices[0]);
            let only_holds = node.modules.iter().all(|module| containers[module.0 as usize]);
            if let (Some(parent), false) = (node.parent, only_holds) {
                let allowed = &decision.nodes[parent.0 as usize].devices;
                prop_assert!(node.devices.iter().all(|device| allowed.contains(device)));
            }
        }
    }

    #[test]
    fn as_many_devices_are_used_as_the_model_can_keep_busy(drawn in any_model()) {
        let request = drawn.request;
        let decision = decide(&request);
        let parts = parts(&request, &decision, 0).min(request.num_devices as usize);
        let used: BTreeSet<PipelineRank> = decision.modules.iter().map(|module| module.pp_rank).collect();
        prop_assert_eq!(used.len(), parts);
        prop_assert_eq!(used, (0..parts as u32).map(PipelineRank).collect());
    }

    #[test]
    fn a_parents_cost_is_its_own_and_its_childrens(drawn in any_model()) {
        let decision = decide(&drawn.request);
        for (number, node) in decision.nodes.iter().enumerate() {
            let below: f64 = decision
                .nodes
                .iter()
                .filter(|child| child.parent.is_some_and(|parent| parent.0 as usize == number))
                .map(|child| child.cost)
                .sum();
            prop_assert!((node.cost - node.own_cost - below).abs() < 1e-9);
        }
    }

    #[test]
    fn whole_modules_have_all_that_is_placed_below_them_on_their_rank(drawn in any_model()) {
        let request = drawn.request;
        let containers = containers(&request);
        let decision = decide(&request);
        for (number, place) in decision.modules.iter().enumerate() {
            let mut below = BTreeSet::from([ModuleId(number as u32)]);
            for (inner, module) in request.modules.iter().enumerate().skip(number) {
                if module.parents.iter().any(|parent| below.contains(parent)) {
                    below.insert(ModuleId(inner as u32));
                }
            }
            let elsewhere = below.iter().any(|module| {
                let inner = &decision.modules[module.0 as usize];
                // A container runs nowhere.
                let members = &decision.nodes[inner.node.0 as usize].modules;
                let is_container = inner.node.0 > 0 && members.iter().all(|member| containers[member.0 as usize]);
                !inner.follows_caller && !is_container && inner.pp_rank != place.pp_rank
            });
            prop_assert_eq!(place.whole, !elsewhere);
        }
    }

    #[test]
    fn the_order_of_parameters_joins_and_parents_decides_nothing(drawn in any_model()) {
        let request = drawn.request;
        let mut other = request.clone();
        let last = request.parameters.len();
        other.parameters.reverse();
        other.joins.reverse();
        for (first, second) in &mut other.joins {
            std::mem::swap(first, second);
        }
        for module in &mut other.modules {
            module.parents.reverse();
            for parameter in &mut module.parameters {
                *parameter = last - 1 - *parameter;
            }
            module.parameters.reverse();
        }
        prop_assert_eq!(decide(&request).modules, decide(&other).modules);
    }

    #[test]
    fn one_device_gets_everything(drawn in any_model()) {
        let mut request = drawn.request;
        request.num_devices = 1;
        let decision = decide(&request);
        prop_assert!(decision.modules.iter().all(|module| module.whole));
        prop_assert_eq!(decision.boundary_crossings_per_microbatch, 0);
    }

    #[test]
    fn placed_modules_are_where_they_were_placed(
        drawn in any_model(), which in any::<prop::sample::Index>(), rank in 0_u32..7, auto in any::<bool>(),
    ) {
        let mut request = drawn.request;
        let module = ModuleId(which.index(request.modules.len()) as u32);
        let pp_rank = PipelineRank(rank % request.num_devices);
        request.auto = auto;
        request.pins.push(shardwright_partition::Pin { module, pp_rank });
        prop_assert_eq!(decide(&request).modules[module.0 as usize].pp_rank, pp_rank);
    }
}

#[test]
fn the_root_alone_is_a_model() {
    let model = Model::new("Net", 3);
    let decision = model.decide();
    assert_eq!(decision.modules[ROOT.0 as usize].pp_rank.0, 0);
    assert_eq!(decision.unused_devices.len(), 2);
}
