//! Modules that are never executed themselves: they count for what they hold once, and change no
//! division.

mod common;

use std::collections::BTreeSet;

use common::drawn::any_model;
use common::{Model, ROOT, gpt2, measured, rank_of};
use proptest::prelude::*;
use shardwright_core::{ModuleId, PipelineRank};
use shardwright_partition::{Computation, ModuleInput, PartitionDecision, PartitionRequest};

fn decide(request: &PartitionRequest) -> PartitionDecision {
    PartitionDecision::new(request).expect("a good request")
}

/// The children of `parent`, and the modules at which a run of them can be cut off: a module that
/// was registered below an earlier sibling is numbered there.
fn own_children(request: &PartitionRequest, parent: usize) -> Vec<usize> {
    let is_child = |number: &usize| {
        let parents = &request.modules[*number].parents;
        parents.contains(&ModuleId(parent as u32))
    };
    (parent + 1..request.modules.len())
        .filter(is_child)
        .collect()
}

/// The request with the children of `parent` from the `first` to the `last` in a container of
/// their own, and the new number of every module.
fn wrapped(
    request: &PartitionRequest,
    parent: usize,
    first: usize,
    last: usize,
) -> (PartitionRequest, Vec<usize>) {
    let run: BTreeSet<usize> = own_children(request, parent)
        .into_iter()
        .filter(|child| (first..=last).contains(child))
        .collect();
    // `named_modules()` comes to the container just before it comes to the first of the run.
    let renamed = |number: usize| number + usize::from(number >= first);
    let renamed_id = |module: ModuleId| ModuleId(renamed(module.0 as usize) as u32);
    let container = ModuleId(first as u32);
    let mut other = request.clone();
    for (number, module) in other.modules.iter_mut().enumerate() {
        for above in &mut module.parents {
            let wraps = run.contains(&number) && above.0 as usize == parent;
            *above = if wraps { container } else { renamed_id(*above) };
        }
    }
    let traced = request.modules[0].own_activation_bytes.is_some();
    let timed = request.modules[0].own_seconds.is_some();
    other.modules.insert(
        first,
        ModuleInput {
            name: "container".to_owned(),
            class_name: "ModuleList".to_owned(),
            parents: vec![renamed_id(ModuleId(parent as u32))],
            parameters: Vec::new(),
            buffer_bytes: 0,
            has_forward: false,
            execution_index: None,
            own_seconds: timed.then_some(0.0),
            own_activation_bytes: traced.then_some(0),
        },
    );
    for (first, second) in &mut other.joins {
        (*first, *second) = (renamed_id(*first), renamed_id(*second));
    }
    for pin in &mut other.pins {
        pin.module = renamed_id(pin.module);
    }
    let numbers = (0..request.modules.len()).map(renamed).collect();
    (other, numbers)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_container_changes_a_division(
        drawn in any_model(),
        parent in any::<prop::sample::Index>(), ends in any::<[prop::sample::Index; 2]>(),
        pin in prop::option::of((any::<prop::sample::Index>(), 0_u32..7)),
    ) {
        let mut request = drawn.request;
        if let Some((module, rank)) = pin {
            let module = ModuleId(module.index(request.modules.len()) as u32);
            let pp_rank = PipelineRank(rank % request.num_devices);
            request.pins.push(shardwright_partition::Pin { module, pp_rank });
        }
        let parents: Vec<usize> = (0..request.modules.len())
            .filter(|&module| !own_children(&request, module).is_empty())
            .collect();
        let parent = *parent.get(&parents);
        let children = own_children(&request, parent);
        let [one, two] = ends.map(|end| *end.get(&children));
        let (other, numbers) = wrapped(&request, parent, one.min(two), one.max(two));
        let (plain, with_container) = (decide(&request), decide(&other));
        for (module, &number) in plain.modules.iter().zip(&numbers) {
            let place = &with_container.modules[number];
            prop_assert_eq!((&module.name, module.pp_rank), (&place.name, place.pp_rank));
            prop_assert_eq!(module.follows_caller, place.follows_caller);
        }
        prop_assert_eq!(plain.parameter_ranks, with_container.parameter_ranks);
        for (load, other) in plain.devices.iter().zip(&with_container.devices) {
            prop_assert_eq!(load.cost.to_bits(), other.cost.to_bits());
        }
    }

    #[test]
    fn a_device_costs_the_share_of_what_it_holds_and_all_of_them_one(drawn in any_model()) {
        let request = drawn.request;
        let decision = decide(&request);
        let timed = decision.computation == Computation::MeasuredTime;
        let traced = request.modules.iter().any(|module| module.execution_index.is_some());
        let mut memory = vec![0.0; request.num_devices as usize];
        let mut compute = memory.clone();
        let mut counted = BTreeSet::new();
        for (module, place) in request.modules.iter().zip(&decision.modules) {
            let rank = place.pp_rank.0 as usize;
            let held = module.parameters.iter().filter(|parameter| counted.insert(**parameter));
            let held: u64 = held.map(|parameter| request.parameters[*parameter].bytes).sum();
            let bytes = held + module.buffer_bytes + module.own_activation_bytes.unwrap_or(0);
            memory[rank] += u32::try_from(bytes).map(f64::from).expect("small");
            let executed = if traced { module.execution_index.is_some() } else { module.has_forward };
            let one = f64::from(u8::from(executed));
            compute[rank] += if timed { module.own_seconds.unwrap_or(0.0) } else { one };
        }
        let share = |of: &[f64], rank: usize| {
            let all: f64 = of.iter().sum();
            if all > 0.0 { of[rank] / all } else { 0.0 }
        };
        let cost = |rank: usize| request.alpha * share(&memory, rank) + (1.0 - request.alpha) * share(&compute, rank);
        let ranks = 0..request.num_devices as usize;
        let all: f64 = ranks.clone().map(cost).sum();
        for rank in ranks {
            let found = decision.devices[rank].cost;
            prop_assert!(all == 0.0 || (found - cost(rank) / all).abs() < 1e-9, "{found} {}", cost(rank) / all);
        }
        let sum: f64 = decision.devices.iter().map(|device| device.cost).sum();
        prop_assert!(all == 0.0 || (sum - 1.0).abs() < 1e-9);
    }
}

/// Equal blocks in a list, or in the model itself; 1 s and 100 bytes of activations each.
fn blocks(in_list: bool) -> Model {
    let mut model = Model::new("Net", 2);
    model.request.modules[0].own_seconds = Some(0.0);
    let list = if in_list {
        model.child(ROOT, "list", "ModuleList")
    } else {
        ROOT
    };
    for number in 0..8 {
        let block = model.leaf(list, &number.to_string(), "Block", 100);
        let input = &mut model.request.modules[block.0 as usize];
        (input.own_seconds, input.own_activation_bytes) = (Some(1.0), Some(100));
    }
    model
}

#[test]
fn equal_blocks_are_halved_in_a_list_as_they_are_without_one() {
    for in_list in [true, false] {
        let decision = blocks(in_list).decide();
        let costs: Vec<f64> = decision.devices.iter().map(|device| device.cost).collect();
        assert!(
            costs.iter().all(|cost| (cost - 0.5).abs() < 1e-9),
            "{costs:?}"
        );
    }
}

#[test]
fn a_list_is_with_the_first_rank_of_what_it_holds() {
    let mut model = Model::new("Net", 2);
    for name in ["first", "second"] {
        let list = model.child(ROOT, name, "ModuleList");
        for number in 0..4 {
            model.leaf(list, &number.to_string(), "Block", 100);
        }
    }
    let decision = model.decide();
    assert_eq!(rank_of(&decision, "first"), 0);
    assert_eq!(rank_of(&decision, "second"), 1);
    assert!(decision.modules[1].whole && decision.modules[6].whole);
}

#[test]
fn a_list_that_is_placed_by_hand_takes_all_in_it_along() {
    let mut model = Model::new("Net", 3);
    model.leaf(ROOT, "stem", "Block", 100);
    let list = model.child(ROOT, "list", "ModuleList");
    for number in 0..4 {
        model.leaf(list, &number.to_string(), "Block", 100);
    }
    model.pin(list, 2);
    let decision = model.decide();
    for name in ["list", "list.0", "list.3"] {
        assert_eq!(rank_of(&decision, name), 2);
    }
}

#[test]
fn a_refinement_moves_the_same_with_a_list_and_without() {
    let mut model = gpt2(8, 64, 512, 2);
    let seconds = |module: &ModuleInput| {
        let head = module.name == "lm_head";
        f64::from(u8::from(!module.parameters.is_empty())) * if head { 0.04 } else { 0.004 }
    };
    for module in &mut model.request.modules {
        let executed = module.execution_index.is_some();
        module.own_seconds = Some(if executed { seconds(module) } else { 0.0 });
    }
    let mut plain = model.request.clone();
    let list = 5;
    assert_eq!(plain.modules[list].class_name, "ModuleList");
    let above = plain.modules[list].parents.clone();
    plain.modules.remove(list);
    for module in &mut plain.modules {
        for parent in &mut module.parents {
            match (parent.0 as usize).cmp(&list) {
                std::cmp::Ordering::Equal => *parent = above[0],
                std::cmp::Ordering::Greater => parent.0 -= 1,
                std::cmp::Ordering::Less => (),
            }
        }
    }
    let places = |request: &mut PartitionRequest| {
        request.measured = Some(measured(request, "interleaved(active=4)", 8, seconds));
        let decision = decide(request);
        let refinement = decision.refinement.expect("measured");
        assert!(refinement.moved_nodes > 0);
        let modules = decision.modules.into_iter();
        let executed = modules.filter(|module| module.class_name != "ModuleList");
        let places: Vec<(String, PipelineRank)> = executed
            .map(|module| (module.name, module.pp_rank))
            .collect();
        (places, refinement.simulated_steps)
    };
    assert_eq!(places(&mut model.request), places(&mut plain));
}
