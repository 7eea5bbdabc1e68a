//! Placement by hand, whole and mixed, and requests that are refused.

mod common;

use common::{Model, ROOT, gpt2, rank_of};
use serde_json::{Value, json};
use shardwright_core::{ModuleId, PipelineRank};
use shardwright_partition::{PartitionDecision, PartitionError, PartitionRequest};

fn by_hand(num_devices: u32) -> Model {
    let mut model = gpt2(4, 64, 256, num_devices);
    model.request.auto = false;
    model
}

fn number(model: &Model, name: &str) -> ModuleId {
    let found = model
        .request
        .modules
        .iter()
        .position(|module| module.name == name);
    ModuleId(found.expect("a module") as u32)
}

#[test]
fn what_is_not_placed_goes_to_the_default_partition() {
    let mut model = by_hand(3);
    model.request.default_partition = PipelineRank(2);
    let decision = model.decide();
    assert!(decision.modules.iter().all(|module| module.pp_rank.0 == 2));
    insta::assert_snapshot!(decision.to_table());
}

#[test]
fn children_go_where_the_nearest_placed_one_above_goes() {
    let mut model = by_hand(3);
    let (transformer, block) = (
        number(&model, "transformer"),
        number(&model, "transformer.h.2"),
    );
    model.pin(transformer, 1);
    model.pin(block, 2);
    let decision = model.decide();
    assert_eq!(rank_of(&decision, ""), 0);
    assert_eq!(rank_of(&decision, "transformer.h.1.mlp.c_fc"), 1);
    assert_eq!(rank_of(&decision, "transformer.h.2.mlp.c_fc"), 2);
    assert_eq!(rank_of(&decision, "transformer.h.2.mlp.act"), 2);
    assert_eq!(
        rank_of(&decision, "transformer.wte"),
        0,
        "its node hangs below the root"
    );
}

#[test]
fn placing_one_of_two_tied_modules_places_both() {
    let mut model = by_hand(2);
    let head = number(&model, "lm_head");
    model.pin(head, 1);
    assert_eq!(rank_of(&model.decide(), "transformer.wte"), 1);
}

#[test]
fn tied_modules_on_different_partitions_are_refused_by_name() {
    let mut model = by_hand(2);
    let (head, words) = (number(&model, "lm_head"), number(&model, "transformer.wte"));
    model.pin(words, 0);
    model.pin(head, 1);
    let text = PartitionDecision::new(&model.request)
        .expect_err("a conflict")
        .to_string();
    assert_eq!(
        text,
        "module \"transformer.wte\" is placed on partition 0 and module \"lm_head\" on partition 1, but they must share one: they share the parameter \"transformer.wte.weight\""
    );
}

#[test]
fn one_module_on_two_partitions_is_refused() {
    let mut model = by_hand(2);
    model.pin(ROOT, 0);
    model.pin(ROOT, 1);
    let text = PartitionDecision::new(&model.request)
        .expect_err("a conflict")
        .to_string();
    assert!(text.contains("they are the same module"), "{text}");
}

#[test]
fn what_is_placed_by_hand_stays_there_while_the_rest_is_divided() {
    let mut model = gpt2(4, 64, 256, 2);
    let last = number(&model, "transformer.h.0");
    model.pin(last, 1);
    let decision = model.decide();
    assert_eq!(rank_of(&decision, "transformer.h.0.mlp.c_fc"), 1);
    let rest: Vec<u32> = (1..4)
        .map(|block| rank_of(&decision, &format!("transformer.h.{block}")))
        .collect();
    assert!(rest.contains(&0) && rest.contains(&1), "{rest:?}");
}

#[test]
fn a_module_without_parameters_goes_where_it_is_placed() {
    let mut model = gpt2(4, 64, 256, 2);
    let dropout = number(&model, "transformer.drop");
    model.pin(dropout, 1);
    let decision = model.decide();
    let place = &decision.modules[dropout.0 as usize];
    assert_eq!((place.pp_rank.0, place.follows_caller), (1, false));
}

fn refused(change: impl FnOnce(&mut Value)) -> String {
    let mut value = serde_json::to_value(&gpt2(2, 64, 256, 2).request).expect("JSON");
    change(&mut value);
    PartitionRequest::from_json(&value.to_string())
        .expect_err("to be refused")
        .to_string()
}

#[test]
fn a_newer_format_is_refused_by_name_before_its_fields_are_looked_at() {
    let text = refused(|value| {
        value["format_version"] = json!(4);
        value["a field of the future"] = json!(1);
    });
    assert_eq!(
        text,
        "the partition request has format_version 4; this version of the library reads up to 3"
    );
    let text = PartitionDecision::from_json("{\"format_version\": 7}")
        .expect_err("newer")
        .to_string();
    assert!(
        text.contains("the partition decision has format_version 7"),
        "{text}"
    );
}

#[test]
fn unknown_fields_are_refused() {
    assert!(refused(|value| value["moduls"] = json!([])).contains("moduls"));
    assert!(refused(|value| value["modules"][1]["cost"] = json!(1)).contains("cost"));
}

#[test]
fn numbers_outside_their_range_are_refused() {
    assert!(
        refused(|value| value["num_devices"] = json!(0))
            .contains("num_devices is 0; allowed: 1 or more")
    );
    assert!(refused(|value| value["alpha"] = json!(1.5)).contains("is 1.5; allowed: 0 to 1"));
    assert!(
        refused(|value| value["default_partition"] = json!(2))
            .contains("default_partition is 2; allowed: 0 to 1")
    );
    assert!(refused(|value| value["joins"] = json!([[0, 999]])).contains("999"));
    let pinned = refused(|value| value["pins"] = json!([{"module": 1, "pp_rank": 5}]));
    assert_eq!(
        pinned,
        "the partition of module \"transformer\" is 5; allowed: 0 to 1"
    );
    let seconds = refused(|value| value["modules"][1]["own_seconds"] = json!(-1.0));
    assert!(
        seconds.contains("own_seconds of module \"transformer\" is -1"),
        "{seconds}"
    );
}

#[test]
fn modules_that_form_no_hierarchy_are_refused() {
    assert!(refused(|value| value["modules"] = json!([])).contains("the first module is the root"));
    let text = refused(|value| value["modules"][1]["parents"] = json!([2]));
    assert!(
        text.contains("\"transformer\" (number 1) cannot be reached from the root"),
        "{text}"
    );
    assert!(refused(|value| value["modules"][1]["parents"] = json!([])).contains("has no parent"));
    assert!(refused(|value| value["modules"][1]["parents"] = json!([5000])).contains("5000"));
}

#[test]
fn parameters_must_be_held_and_exist() {
    let orphan = json!({"names": ["lost"], "bytes": 4, "numel": 1});
    let text = refused(|value| {
        value["parameters"]
            .as_array_mut()
            .expect("a list")
            .push(orphan);
    });
    assert_eq!(text, "parameter \"lost\" is held by no module");
    assert!(refused(|value| value["modules"][0]["parameters"] = json!([500])).contains("500"));
}

#[test]
fn a_decision_reads_back_as_itself() {
    let decision = gpt2(4, 64, 256, 2).decide();
    assert_eq!(
        PartitionDecision::from_json(&decision.to_json()),
        Ok(decision)
    );
    assert!(matches!(
        PartitionDecision::from_json("[]"),
        Err(PartitionError::Format { .. })
    ));
}

#[test]
fn modules_that_contain_each_other_do_not_hang() {
    let mut model = Model::new("Net", 2);
    let first = model.leaf(ROOT, "first", "Linear", 10);
    let second = model.leaf(first, "second", "Linear", 10);
    model.request.modules[first.0 as usize].parents.push(second);
    assert_eq!(model.decide().modules.len(), 3);
}
