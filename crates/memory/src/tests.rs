//! Laws of the account, the meter and the advice.

use proptest::prelude::*;
use shardwright_core::{Config, Phase};

use crate::{Advice, Categories, Expected, Meter, Situation, advise};

const MIB: u64 = 1 << 20;

fn config(text: &str) -> Config {
    Config::parse(text).expect("an allowed configuration")
}

fn full() -> Categories {
    Categories {
        parameters: Some(100 * MIB),
        gradients: Some(100 * MIB),
        optimizer_state: Some(200 * MIB),
        activations: Some(400 * MIB),
        buffers: Some(MIB),
        communication: Some(8 * MIB),
    }
}

fn advice(text: &str, in_flight: u32, replicas: u32) -> Vec<Advice> {
    advice_of(text, in_flight, replicas, false)
}

fn advice_on_device(text: &str) -> Vec<Advice> {
    advice_of(text, 1, 1, true)
}

fn advice_of(text: &str, in_flight: u32, replicas: u32, on_device: bool) -> Vec<Advice> {
    let config = config(text);
    advise(&Situation {
        config: &config,
        categories: full(),
        in_flight,
        microbatches: config.microbatches,
        replicas,
        checkpointed: (300 * MIB, 12),
        offloadable: 150 * MIB,
        on_device,
    })
}

fn saving(advice: &[Advice], setting: &str) -> Option<u64> {
    let found = advice.iter().find(|one| one.setting.contains(setting));
    found.map(|one| one.saves)
}

#[test]
fn a_prediction_counts_each_category() {
    let expected = Expected {
        parameter_bytes: 10,
        gradient_bytes: 8,
        buffer_bytes: 3,
        activation_bytes: Some(7),
        in_flight: 3,
        optimizer_bytes: Some(16),
        master_bytes: 10,
        optimizer_shards: 2,
    };
    let categories = expected.categories();
    assert_eq!(categories.parameters, Some(10));
    assert_eq!(categories.gradients, Some(8));
    assert_eq!(categories.optimizer_state, Some(13));
    assert_eq!(categories.activations, Some(21));
    assert_eq!(categories.buffers, Some(3));
    assert_eq!(categories.total(), 55);
}

#[test]
fn what_is_not_known_stays_so() {
    let categories = Expected::default().categories();
    assert_eq!(categories.optimizer_state, None);
    assert_eq!(categories.activations, None);
    assert_eq!(categories.communication, None);
}

#[test]
fn all_forwards_before_the_backwards_are_activations() {
    let mut meter = Meter::new(1000);
    for in_use in [1010, 1020, 1030] {
        meter.sample(in_use, Phase::Forward);
    }
    meter.sample(1040, Phase::Backward);
    meter.sample(1050, Phase::Backward); // 10 are freed, and 20 of gradients made
    assert_eq!(meter.activations(1020), 40);
}

#[test]
fn gradients_are_no_activations() {
    let mut meter = Meter::new(1000);
    meter.sample(1010, Phase::Forward);
    meter.sample(1010, Phase::Backward);
    meter.sample(1100, Phase::Forward); // gradients of 100, nothing else
    meter.sample(1130, Phase::Backward);
    assert_eq!(meter.activations(1100), 30);
}

#[test]
fn a_step_may_end_with_less_than_it_began_with() {
    let mut meter = Meter::new(1000);
    meter.sample(900, Phase::Backward);
    assert_eq!(meter.activations(800), 0);
}

#[test]
fn fewer_microbatches_in_flight_save_activations() {
    let simple = advice(
        r#"{"pipeline_parallel_degree": 2, "microbatches": 8, "pipeline": "simple"}"#,
        8,
        1,
    );
    assert_eq!(saving(&simple, "interleaved"), Some(200 * MIB));
    assert_eq!(saving(&simple, "checkpointing"), Some(350 * MIB));
    assert_eq!(saving(&simple, "microbatches"), None);
    let interleaved = advice(
        r#"{"pipeline_parallel_degree": 2, "microbatches": 8}"#,
        4,
        1,
    );
    assert_eq!(
        saving(&interleaved, "\"active_microbatches\": 2"),
        Some(200 * MIB)
    );
    assert_eq!(
        saving(&interleaved, "\"microbatches\": 16"),
        Some(200 * MIB)
    );
}

#[test]
fn replicas_share_the_state_of_the_optimizer_where_that_is_built() {
    let two = advice(r#"{"ddp": true}"#, 1, 2);
    let built = crate::advice::is_built("shard_optimizer_state");
    assert_eq!(
        saving(&two, "shard_optimizer_state"),
        built.then_some(100 * MIB)
    );
    assert_eq!(saving(&advice("{}", 1, 1), "shard_optimizer_state"), None);
    let half = advice(r#"{"ddp": true, "bf16": true}"#, 1, 2);
    assert_eq!(
        saving(&half, "shard_optimizer_state"),
        built.then_some(100 * MIB)
    );
    let sharded = r#"{"ddp": true, "sharded_data_parallel_degree": 2}"#;
    let sharded = advice(sharded, 1, 2);
    assert_eq!(saving(&sharded, "shard_optimizer_state"), None);
}

#[test]
fn what_checkpointed_calls_keep_outside_of_the_horizon_may_be_offloaded() {
    let setting = "\"offload_activations\": \"disk\"";
    let found = advice(r#"{"activation_loading_horizon": 4}"#, 1, 1);
    assert_eq!(saving(&found, setting), Some(200 * MIB));
    assert_eq!(
        saving(
            &advice(r#"{"activation_loading_horizon": 12}"#, 1, 1),
            setting
        ),
        None,
        "all of it is within the horizon"
    );
    assert_eq!(
        saving(&advice(r#"{"offload_activations": "disk"}"#, 1, 1), setting),
        None
    );
}

#[test]
fn optimizer_state_may_go_to_a_disk_unless_it_does() {
    let setting = "\"offload_optimizer\": \"disk\"";
    assert_eq!(saving(&advice("{}", 1, 1), setting), Some(150 * MIB));
    let in_memory = r#"{"offload_optimizer": true}"#;
    assert_eq!(saving(&advice(in_memory, 1, 1), setting), Some(150 * MIB));
    let on_disk = r#"{"offload_optimizer": "disk"}"#;
    assert_eq!(saving(&advice(on_disk, 1, 1), setting), None);
}

#[test]
fn optimizer_state_of_a_device_may_go_to_host_memory_unless_it_is_offloaded() {
    let setting = "\"offload_optimizer\": true";
    assert_eq!(saving(&advice_on_device("{}"), setting), Some(150 * MIB));
    for text in [
        r#"{"offload_optimizer": true}"#,
        r#"{"offload_optimizer": "disk"}"#,
    ] {
        let advice = advice_on_device(text);
        let keys = advice
            .iter()
            .filter(|one| one.setting.contains("offload_optimizer"));
        assert_eq!(keys.count(), 0);
    }
}

proptest! {
    #[test]
    fn no_advice_saves_more_than_there_is(
        bytes in prop::collection::vec(prop::option::of(any::<u64>()), 6),
        in_flight in 0_u32..100,
        microbatches in 1_u32..100,
        replicas in 0_u32..100,
        pipeline in prop::sample::select(vec!["simple", "interleaved", "looped", "zero_bubble", "auto"]),
        degree in 1_u32..9,
        checkpointed in any::<(u64, u32)>(),
        offloadable in any::<u64>(),
        on_device in any::<bool>(),
    ) {
        let text = format!(
            r#"{{"pipeline_parallel_degree": {degree}, "microbatches": {microbatches}, "pipeline": "{pipeline}"}}"#
        );
        let config = config(&text);
        let categories = Categories {
            parameters: bytes[0].map(|bytes| bytes / 8),
            gradients: bytes[1].map(|bytes| bytes / 8),
            optimizer_state: bytes[2].map(|bytes| bytes / 8),
            activations: bytes[3].map(|bytes| bytes / 8),
            buffers: bytes[4].map(|bytes| bytes / 8),
            communication: bytes[5].map(|bytes| bytes / 8),
        };
        let situation = Situation { config: &config, categories, in_flight, microbatches, replicas, checkpointed, offloadable, on_device };
        let advice = advise(&situation);
        for one in &advice {
            prop_assert!(one.saves > 0 && one.saves <= categories.total(), "{one:?}");
        }
        prop_assert!(advice.windows(2).all(|pair| pair[0].saves >= pair[1].saves));
    }

    #[test]
    fn a_meter_reports_no_more_than_the_peak_added(
        baseline in 0_u64..1000,
        samples in prop::collection::vec((0_u64..2000, any::<bool>()), 0..20),
        end in 0_u64..2000,
    ) {
        let mut meter = Meter::new(baseline);
        let mut peak = baseline;
        for (in_use, backward) in samples {
            meter.sample(in_use, if backward { Phase::Backward } else { Phase::Forward });
            peak = peak.max(in_use);
        }
        prop_assert!(meter.activations(end) <= peak - baseline);
    }
}
