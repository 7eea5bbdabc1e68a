//! What a refinement moves, and what it leaves alone.

mod common;

use common::drawn::{any_model, containers};
use common::{Model, ROOT, gpt2, measured, rank_of};
use proptest::prelude::*;
use shardwright_core::{ModuleId, PipelineRank};
use shardwright_partition::{ModuleInput, PartitionDecision, PartitionRequest, Pin, Refinement};

/// Seconds of a module of a GPT-2 in a forward: those of its matrices, and next to nothing elsewhere.
fn gpt2_seconds(module: &ModuleInput) -> f64 {
    match module.name.rsplit('.').next() {
        Some("c_fc") => 0.012,
        Some("c_attn") => 0.009,
        Some("c_proj") if module.name.contains("mlp") => 0.012,
        Some("c_proj") => 0.003,
        Some("attn") => 0.004,
        Some("lm_head") => 0.050,
        _ => 0.0001,
    }
}

fn refined(request: &PartitionRequest) -> (PartitionDecision, Refinement) {
    let decision = PartitionDecision::new(request).expect("a good request");
    let refinement = decision.refinement.expect("a measured forward");
    (decision, refinement)
}

fn without(request: &PartitionRequest) -> PartitionDecision {
    let mut request = request.clone();
    request.measured = None;
    PartitionDecision::new(&request).expect("a good request")
}

fn bytes_of_the_fullest(decision: &PartitionDecision) -> u64 {
    let devices = decision.devices.iter();
    devices
        .map(|device| device.parameter_bytes)
        .max()
        .expect("a device")
}

/// The benchmark's GPT-2, measured.
fn benchmark(schedule: &str, num_devices: u32) -> Model {
    let mut model = gpt2(8, 512, 8192, num_devices);
    model.request.measured = Some(measured(&model.request, schedule, 8, gpt2_seconds));
    model
}

#[test]
fn equal_blocks_and_a_heavy_head_keep_both_ranks_busy() {
    for schedule in [
        "interleaved(active=4)",
        "zero_bubble(active=4)",
        "interleaved(active=2)",
        "simple",
    ] {
        let model = benchmark(schedule, 2);
        let (decision, refinement) = refined(&model.request);
        // 8 microbatches, 3 times the forward, evenly on two ranks.
        let ideal = 8.0 * 3.0 * (8.0 * 0.0405 + 0.0505) / 2.0;
        assert!(refinement.seconds_before > 1.2 * ideal, "{schedule}");
        assert!(
            refinement.seconds_after < 1.2 * ideal,
            "{schedule}: {refinement:?} of {ideal}"
        );
        let before = bytes_of_the_fullest(&without(&model.request));
        assert!(bytes_of_the_fullest(&decision) <= before);
        // The root's own code stays, and so does what it calls through.
        assert_eq!(rank_of(&decision, ""), 0);
        assert_eq!(
            rank_of(&decision, "lm_head"),
            rank_of(&decision, "transformer.wte")
        );
        let blocks: Vec<u32> = (0..8)
            .map(|block| rank_of(&decision, &format!("transformer.h.{block}")))
            .collect();
        let changes = blocks.windows(2).filter(|pair| pair[0] != pair[1]).count();
        assert!(changes >= 4, "{schedule}: blocks in turns, not {blocks:?}");
        assert!(
            decision
                .modules
                .iter()
                .any(|module| !module.whole && module.class_name == "GPT2Block"),
            "{schedule}: a block with a part elsewhere"
        );
    }
}

#[test]
fn the_same_request_is_refined_the_same_way() {
    let model = benchmark("zero_bubble(active=4)", 3);
    assert_eq!(refined(&model.request), refined(&model.request));
    let read =
        PartitionDecision::from_json(&refined(&model.request).0.to_json()).expect("what it wrote");
    assert_eq!(read, refined(&model.request).0);
}

#[test]
fn modules_too_small_for_a_call_are_not_cut_to_pieces() {
    let mut model = gpt2(8, 64, 100, 2);
    let tiny = measured(&model.request, "interleaved(active=4)", 8, |_| 1e-6);
    model.request.measured = Some(tiny);
    let (decision, _) = refined(&model.request);
    let before = without(&model.request).boundary_crossings_per_microbatch;
    assert!(decision.boundary_crossings_per_microbatch <= before);
    assert!(decision.unused_devices.is_empty());
}

#[test]
fn memory_alone_allows_no_byte_more_on_the_fullest_rank() {
    let mut model = benchmark("interleaved(active=4)", 2);
    // A block that holds much and takes no time, and one that takes long and holds little.
    model.leaf(ROOT, "table", "Embedding", 30_000_000);
    model.request.alpha = 1.0;
    model.request.measured = Some(measured(
        &model.request,
        "interleaved(active=4)",
        8,
        gpt2_seconds,
    ));
    let before = bytes_of_the_fullest(&without(&model.request));
    let (decision, strict) = refined(&model.request);
    assert!(bytes_of_the_fullest(&decision) <= before);

    model.request.alpha = 0.2;
    let before = bytes_of_the_fullest(&without(&model.request));
    let (decision, loose) = refined(&model.request);
    assert!(bytes_of_the_fullest(&decision) <= before + before * 2 / 5);
    assert!(loose.seconds_after <= strict.seconds_after);
}

#[test]
fn what_is_placed_by_hand_stays_with_all_below_it() {
    let mut model = benchmark("zero_bubble(active=4)", 2);
    let number = |model: &Model, name: &str| {
        let mut modules = model.request.modules.iter();
        ModuleId(modules.position(|module| module.name == name).expect(name) as u32)
    };
    let (block, mlp) = (
        number(&model, "transformer.h.0"),
        number(&model, "transformer.h.3.mlp"),
    );
    model.pin(block, 1);
    model.pin(mlp, 1);
    let (decision, refinement) = refined(&model.request);
    assert!(refinement.moved_nodes > 0);
    for module in &decision.modules {
        if module.name.starts_with("transformer.h.0.")
            || module.name.starts_with("transformer.h.3.mlp")
        {
            assert_eq!(module.pp_rank.0, 1, "{}", module.name);
        }
    }
    model.request.auto = false;
    let by_hand = model.decide();
    assert_eq!(by_hand.refinement, None);
    assert_eq!(by_hand.modules, without(&model.request).modules);
}

#[test]
fn a_module_that_must_not_be_divided_stays_whole() {
    let mut model = benchmark("zero_bubble(active=4)", 2);
    let blocks: Vec<ModuleId> = (0..model.request.modules.len())
        .filter(|&module| model.request.modules[module].class_name == "GPT2Block")
        .map(|module| ModuleId(module as u32))
        .collect();
    let forward = model.request.measured.as_mut().expect("measured");
    forward.undivided = blocks;
    let (decision, refinement) = refined(&model.request);
    assert!(refinement.moved_nodes > 0);
    let mut blocks = decision
        .modules
        .iter()
        .filter(|module| module.class_name == "GPT2Block");
    assert!(blocks.all(|block| block.whole));

    // Whose microbatches run one after another anyway is left as it is.
    model.request.measured.as_mut().expect("measured").undivided = vec![ROOT];
    let decision = model.decide();
    assert_eq!(decision.refinement, None);
    assert_eq!(decision.modules, without(&model.request).modules);
}

#[test]
fn a_spare_rank_is_used_where_that_is_faster_and_none_is_left_empty() {
    let mut model = Model::new("Net", 4);
    for number in 0..3 {
        let block = model.child(ROOT, &number.to_string(), "Block");
        model.leaf(block, "one", "Linear", 1000);
        model.leaf(block, "two", "Linear", 1000);
    }
    model.request.alpha = 0.0;
    let times = |module: &ModuleInput| {
        if module.class_name == "Linear" {
            0.05
        } else {
            0.0
        }
    };
    model.request.measured = Some(measured(&model.request, "interleaved(active=8)", 8, times));
    let (decision, refinement) = refined(&model.request);
    assert!(refinement.seconds_after <= refinement.seconds_before);
    assert!(decision.unused_devices.is_empty());
}

#[test]
fn thousands_of_modules_are_refined_within_the_budget() {
    let mut model = gpt2(200, 64, 1000, 8);
    model.request.measured = Some(measured(
        &model.request,
        "interleaved(active=10)",
        64,
        gpt2_seconds,
    ));
    let (_, refinement) = refined(&model.request);
    assert!(refinement.seconds_after < refinement.seconds_before);
    // Each of at least 200 stretches on 8 ranks, 32 microbatches.
    assert!(refinement.simulated_steps < 2000, "{refinement:?}");
}

#[test]
fn a_forward_that_makes_no_sense_is_refused() {
    let good = benchmark("simple", 2).request;
    let refused = |change: fn(&mut shardwright_partition::Measured)| {
        let mut request = good.clone();
        change(request.measured.as_mut().expect("measured"));
        PartitionDecision::new(&request)
            .expect_err("a bad forward")
            .to_string()
    };
    let text = refused(|forward| forward.schedule = "fastest".to_owned());
    assert!(
        text.contains("fastest") && text.contains("interleaved(active=N)"),
        "{text}"
    );
    let text = refused(|forward| forward.executions[3].module = ModuleId(9999));
    assert!(
        text.contains("execution 3") && text.contains("9999"),
        "{text}"
    );
    let text = refused(|forward| forward.executions[3].caller = Some(3));
    assert!(
        text.contains("execution 3") && text.contains("earlier"),
        "{text}"
    );
    let text = refused(|forward| forward.pieces[2].seconds = f64::NAN);
    assert!(text.contains("piece 2") && text.contains("NaN"), "{text}");
    let text = refused(|forward| forward.pieces[2].execution = 60);
    assert!(text.contains("piece 2"), "{text}");
    let text = refused(|forward| forward.undivided = vec![ModuleId(9999)]);
    assert!(text.contains("9999"), "{text}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_refinement_breaks_a_rule(
        drawn in any_model(),
        seconds in prop::collection::vec(0_u32..20, 40),
        schedule in prop::sample::select(vec![
            "simple", "interleaved(active=3)", "looped(active=4)", "zero_bubble(active=4)",
        ]),
        placed in prop::option::of((any::<prop::sample::Index>(), 0_u32..7)),
        undivided in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut request = drawn.request;
        let len = request.modules.len();
        if let Some((module, rank)) = placed {
            let module = ModuleId(module.index(len) as u32);
            request.pins.push(Pin { module, pp_rank: PipelineRank(rank % request.num_devices) });
        }
        let time = |module: &ModuleInput| {
            let number = module.name.rsplit('.').next().and_then(|name| name.parse::<usize>().ok());
            f64::from(seconds[number.unwrap_or(0)]) / 1000.0
        };
        let mut forward = measured(&request, schedule, 4, time);
        forward.undivided.extend(undivided.map(|module| ModuleId(module.index(len) as u32)));
        request.measured = Some(forward);
        let before = without(&request);
        let after = PartitionDecision::new(&request).expect("a good request");
        prop_assert_eq!(&after, &PartitionDecision::new(&request).expect("a good request"));
        let Some(refinement) = after.refinement else {
            prop_assert_eq!(after.modules, before.modules);
            return Ok(());
        };
        prop_assert!(refinement.seconds_after <= refinement.seconds_before);
        prop_assert_eq!(refinement.seconds_after < refinement.seconds_before, refinement.moved_nodes > 0);
        if refinement.moved_nodes == 0 {
            prop_assert_eq!(&after.modules, &before.modules);
        }
        prop_assert_eq!(after.modules[0].pp_rank, before.modules[0].pp_rank);

        let bytes = |decision: &PartitionDecision| {
            let mut held: Vec<u64> = decision.devices.iter().map(|device| device.parameter_bytes).collect();
            for (module, place) in request.modules.iter().zip(&decision.modules) {
                held[place.pp_rank.0 as usize] += module.own_activation_bytes.unwrap_or(0);
            }
            held.into_iter().max().expect("a device") as u32
        };
        let most = f64::from(bytes(&before)) * (1.0 + (1.0 - request.alpha) / 2.0);
        prop_assert!(f64::from(bytes(&after)) <= most.max(1.0));
        let used = |decision: &PartitionDecision| decision.devices.iter().filter(|device| device.parameters > 0).count();
        // Parameters of no values are held by somebody too.
        prop_assert!(used(&after) >= used(&before).min(1));

        for (module, place) in request.modules.iter().zip(&after.modules) {
            for &parameter in &module.parameters {
                prop_assert_eq!(after.parameter_ranks[parameter], place.pp_rank);
            }
        }
        for (first, second) in &request.joins {
            let rank = |module: &ModuleId| after.modules[module.0 as usize].pp_rank;
            prop_assert_eq!(rank(first), rank(second));
        }
        let containers = containers(&request);
        for pin in &request.pins {
            let below = |node: usize| {
                let above = |node: usize| after.nodes[node].parent.map(|parent| parent.0 as usize);
                let mut line = std::iter::successors(Some(node), |node| above(*node));
                line.any(|node| after.nodes[node].modules.contains(&pin.module))
            };
            for (node, (one, other)) in before.nodes.iter().zip(&after.nodes).enumerate() {
                // A container runs nowhere: it is where its children are.
                let is_container = one.modules.iter().all(|module| containers[module.0 as usize]);
                prop_assert!(!below(node) || is_container || one.pp_rank == other.pp_rank);
            }
        }
        for module in &request.measured.as_ref().expect("measured").undivided {
            prop_assert!(after.modules[module.0 as usize].whole);
        }
    }
}
