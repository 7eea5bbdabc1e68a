//! What becomes of models like those that people divide.

mod common;

use common::{Model, ROOT, gpt2, rank_of};
use shardwright_core::ModuleId;
use shardwright_partition::Calls;

#[test]
fn a_small_gpt2_over_two_devices() {
    let decision = gpt2(4, 128, 256, 2).decide();
    insta::assert_snapshot!(decision.to_table());
    assert_eq!(
        rank_of(&decision, "lm_head"),
        rank_of(&decision, "transformer.wte")
    );
    let at: Vec<u32> = (0..4)
        .map(|block| rank_of(&decision, &format!("transformer.h.{block}")))
        .collect();
    assert_eq!(at, [0, 0, 1, 1]);
}

#[test]
fn a_gpt2_whose_embedding_costs_as_much_as_some_blocks() {
    insta::assert_snapshot!(gpt2(8, 512, 8192, 2).decide().to_table());
    insta::assert_snapshot!(gpt2(8, 512, 8192, 4).decide().to_table());
}

#[test]
fn an_embedding_that_dominates_gets_a_device_of_its_own_and_no_more() {
    let decision = gpt2(2, 64, 100_000, 3).decide();
    insta::assert_snapshot!(decision.to_table());
    assert!(decision.unused_devices.is_empty());
}

#[test]
fn each_of_two_devices_gets_a_sensible_share_of_any_gpt2() {
    for (layers, hidden, vocabulary) in [
        (4, 128, 256),
        (8, 512, 8192),
        (12, 768, 50_257),
        (4, 256, 256),
        (6, 192, 1024),
    ] {
        let decision = gpt2(layers, hidden, vocabulary, 2).decide();
        let all: u64 = decision
            .devices
            .iter()
            .map(|device| device.parameters)
            .sum();
        for device in &decision.devices {
            assert!(device.parameters * 5 >= all, "{}", decision.to_table());
        }
    }
}

#[test]
fn a_module_is_whole_when_all_below_it_is_on_its_rank() {
    let decision = gpt2(4, 128, 256, 2).decide();
    let whole = |name: &str| {
        decision
            .modules
            .iter()
            .find(|module| module.name == name)
            .expect("a module")
            .whole
    };
    assert!(!whole("") && !whole("transformer") && !whole("transformer.h"));
    assert!(whole("transformer.h.0") && whole("transformer.h.3") && whole("lm_head"));
}

#[test]
fn equal_segments_get_devices_in_their_order() {
    let mut model = Model::new("Sequential", 4);
    for number in 0..8 {
        model.leaf(ROOT, &number.to_string(), "Linear", 100);
    }
    let decision = model.decide();
    let at: Vec<u32> = decision.modules[1..]
        .iter()
        .map(|module| module.pp_rank.0)
        .collect();
    assert_eq!(at, [0, 0, 1, 1, 2, 2, 3, 3]);
}

#[test]
fn consecutive_children_of_a_sequential_on_one_rank_are_one_request() {
    let mut model = Model::new("Sequential", 2);
    for number in 0..4 {
        model.leaf(ROOT, &number.to_string(), "Linear", 100);
        model.child(ROOT, &format!("relu{number}"), "ReLU");
    }
    let decision = model.decide();
    assert_eq!(decision.crossings.len(), 2);
    assert_eq!(decision.boundary_crossings_per_microbatch, 1);
    assert!(!decision.crossings[0].same_request && decision.crossings[1].same_request);
}

#[test]
fn traced_calls_are_counted_as_often_as_they_were_made() {
    let mut model = gpt2(4, 128, 256, 2);
    let block = model
        .request
        .modules
        .iter()
        .position(|module| module.name == "transformer.h.3");
    let calls = |count| Calls {
        caller: ModuleId(1),
        callee: ModuleId(block.expect("a block") as u32),
        count,
    };
    model.request.calls = vec![calls(3), calls(2)];
    let decision = model.decide();
    assert_eq!(decision.boundary_crossings_per_microbatch, 5);
    assert_eq!(decision.crossings.len(), 1);
}

#[test]
fn children_stand_in_order_of_execution_and_the_never_executed_last() {
    let mut model = Model::new("Net", 2);
    for name in ["d", "c", "b", "a", "idle"] {
        model.leaf(ROOT, name, "Linear", 100);
    }
    for (number, index) in [
        (1, Some(9)),
        (2, Some(8)),
        (3, Some(7)),
        (4, Some(6)),
        (5, None),
    ] {
        model.request.modules[number].execution_index = index;
    }
    let decision = model.decide();
    let at = |names: &[&str]| -> Vec<u32> {
        names.iter().map(|name| rank_of(&decision, name)).collect()
    };
    // a b | c d idle: the heavier segment wins the first device.
    assert_eq!(at(&["a", "b", "c", "d", "idle"]), [1, 1, 0, 0, 0]);
}

#[test]
fn measured_seconds_and_bytes_replace_the_number_of_modules() {
    let mut model = Model::new("Net", 2);
    for name in ["a", "b", "c"] {
        model.leaf(ROOT, name, "Linear", 100);
    }
    model.request.alpha = 0.0;
    for (number, seconds) in [(0, 0.5), (1, 8.0), (2, 1.0), (3, 1.0)] {
        model.request.modules[number].own_seconds = Some(seconds);
    }
    let decision = model.decide();
    assert!((decision.nodes[1].cost - 8.0 / 10.5).abs() < 1e-9);
    assert!((decision.nodes[0].own_cost - 0.5 / 10.5).abs() < 1e-9);
    assert_eq!(rank_of(&decision, "a"), 0);
    let others = (rank_of(&decision, "b"), rank_of(&decision, "c"));
    assert_eq!(
        others,
        (1, 1),
        "a single module has no use for a second device"
    );

    model.request.alpha = 1.0;
    model.request.modules[0].own_activation_bytes = Some(0);
    model.request.modules[3].own_activation_bytes = Some(400);
    let decision = model.decide();
    assert!(
        (decision.nodes[3].cost - 0.5).abs() < 1e-9,
        "400 of its own and 400 of 1600 bytes"
    );
}

#[test]
fn a_segment_without_a_device_goes_to_its_parents_also_within_a_segment() {
    // Segments [big], [tiny, pair]: the second wins devices 1 and 2, divides again, and leaves
    // `tiny` without one.
    let mut model = Model::new("Net", 3);
    model.leaf(ROOT, "big", "Linear", 1100);
    model.leaf(ROOT, "tiny", "Linear", 1);
    let pair = model.child(ROOT, "pair", "Net");
    for name in ["left", "middle", "right"] {
        model.leaf(pair, name, "Linear", 600);
    }
    model.request.alpha = 1.0;
    let decision = model.decide();
    assert_eq!(rank_of(&decision, ""), 0);
    assert_eq!(rank_of(&decision, "tiny"), 0, "{}", decision.to_table());
}

#[test]
fn what_costs_nothing_ends_the_division() {
    let mut model = Model::new("Net", 4);
    for name in ["a", "b", "c"] {
        model.leaf(ROOT, name, "Linear", 0);
    }
    model.request.alpha = 1.0;
    let decision = model.decide();
    assert!(decision.modules.iter().all(|module| module.pp_rank.0 == 0));
    assert_eq!(decision.unused_devices.len(), 3);
}

#[test]
fn a_module_without_parameters_stays_with_its_parent_and_follows_its_caller() {
    let decision = gpt2(4, 128, 256, 2).decide();
    for module in &decision.modules {
        if module.class_name == "Dropout" {
            let parent = module.name.rsplit_once('.').expect("not the root").0;
            assert_eq!(module.pp_rank.0, rank_of(&decision, parent));
            assert!(module.follows_caller);
        }
    }
    assert!(!decision.modules[0].follows_caller);
}

#[test]
fn a_shared_module_with_buffers_has_one_place() {
    let mut model = Model::new("Net", 2);
    let left = model.leaf(ROOT, "left", "Block", 100);
    let shared = model.child(left, "positions", "Rotary");
    let right = model.leaf(ROOT, "right", "Block", 100);
    model.request.modules[shared.0 as usize].parents.push(right);
    assert!(model.decide().modules[shared.0 as usize].follows_caller);
    model.request.modules[shared.0 as usize].buffer_bytes = 64;
    let decision = model.decide();
    assert!(!decision.modules[shared.0 as usize].follows_caller);
    assert_eq!(
        decision.boundary_crossings_per_microbatch, 2,
        "right, and from there positions"
    );
}

#[test]
fn a_joined_module_shares_the_rank_of_the_other() {
    let mut model = Model::new("Net", 2);
    let names = ["a", "b", "c", "d"];
    let modules = names.map(|name| model.leaf(ROOT, name, "Linear", 100));
    model.request.joins.push((modules[0], modules[3]));
    let decision = model.decide();
    assert_eq!(rank_of(&decision, "a"), rank_of(&decision, "d"));
    assert_eq!(decision.nodes.len(), 4);
}

#[test]
fn the_node_of_a_tied_head_hangs_where_it_has_the_fewest_steps_to_the_root() {
    let decision = gpt2(2, 64, 256, 2).decide();
    let tied = decision
        .modules
        .iter()
        .find(|module| module.name == "lm_head")
        .expect("the head");
    assert_eq!(
        decision.nodes[tied.node.0 as usize]
            .parent
            .expect("below the root")
            .0,
        0
    );
}
