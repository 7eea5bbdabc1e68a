use super::*;
use crate::Phase;

fn parse(value: &Value) -> Result<Config, ConfigError> {
    Config::parse(&value.to_string())
}

fn refused(value: &Value) -> String {
    parse(value).expect_err("to be refused").to_string()
}

#[test]
fn the_defaults_are_those_of_the_interface() {
    let config = parse(&json!({})).expect("the defaults");
    let effective = object_of(&config.to_json());
    let expected = r#"{
        "pipeline_parallel_degree": 1, "partitions": 1, "microbatches": 1, "pipeline": "interleaved",
        "optimize": "memory", "placement_strategy": "cluster", "auto_partition": true, "default_partition": 0,
        "contiguous": true, "horovod": false, "memory_weight": 0.8, "ddp": false, "ddp_port": null,
        "ddp_dist_backend": "auto", "active_microbatches": 3, "deterministic_server": false,
        "tensor_parallel_degree": 1, "fp16": false, "bf16": false, "fp16_params": false,
        "shard_optimizer_state": false, "offload_activations": false, "activation_loading_horizon": 4,
        "prescaled_batch": false, "_prescaled_batch": false, "skip_tracing": false, "sharded_data_parallel_degree": 1,
        "sdp_reduce_bucket_size": 500000000, "sdp_param_persistence_threshold": 1000000,
        "sdp_max_live_parameters": 1000000000, "sdp_hierarchical_allgather": true,
        "sdp_gradient_clipping": 1.0, "delayed_parameter_initialization": false, "static_mode": false,
        "fast_mode": false, "checkpoint_attentions": true, "load_partition": false, "partition_file": null,
        "overlapping_allreduce": null, "_match_weights": false, "_fp32_grad_accumulation": false,
        "seed": 0, "reproducible_rng": false,
        "tensor_handles": true, "static_steps": 5, "on_departure": "fallback",
        "refine_partition": true, "sdp_stage": 3, "stall_report_seconds": 30.0, "stall_timeout_seconds": 1800.0,
        "liveness_timeout_seconds": 6.0, "connect_timeout_seconds": 60.0, "secret_file": null,
        "allow_insecure_hosts": false, "bind_interface_address": null, "transport": "auto", "encrypt": false,
        "comm_spin_microseconds": null, "ucx_library": null, "comm_buffer_bytes": 1073741824,
        "memory_limit_bytes": null, "offload_optimizer": false,
        "offload_directory": null, "elastic_degrees": null
    }"#;
    assert_eq!(effective, object_of(expected));
}

#[test]
fn the_table_and_the_fields_name_the_same_keys_in_one_order() {
    let effective = object_of(&parse(&json!({})).expect("the defaults").to_json());
    let names: Vec<&str> = KEYS.iter().map(|key| key.name).collect();
    assert_eq!(effective.keys().collect::<Vec<_>>(), names);
}

#[test]
fn every_key_takes_its_default_and_nothing_of_another_kind() {
    for key in KEYS {
        let default = key.default_json();
        let accepted = parse(&json!({ key.name: default }));
        assert!(accepted.is_ok(), "{}: {accepted:?}", key.name);
        let unknown = json!("no such word, nor address");
        for wrong in [json!([]), json!({}), json!(-1), unknown] {
            if key.kind == ValueKind::Text && wrong.is_string() {
                continue;
            }
            let text = refused(&json!({ key.name: wrong }));
            for part in [key.name, "allowed: ", &wrong.to_string()] {
                assert!(text.contains(part), "{text}");
            }
        }
    }
}

#[test]
fn the_effective_configuration_reads_back_as_itself() {
    for given in [
        json!({}),
        json!({"partitions": 4, "microbatches": 9, "pipeline": "simple", "optimize": "speed"}),
        json!({"pipeline_parallel_degree": 2, "ddp": true, "ddp_port": 29500, "ddp_dist_backend": "nccl"}),
        json!({"auto_partition": false, "default_partition": 0, "placement_strategy": "TDP"}),
    ] {
        let config = parse(&given).expect("a good configuration");
        assert_eq!(Config::parse(&config.to_json()), Ok(config));
    }
}

#[test]
fn an_unknown_key_is_refused_with_the_nearest_name() {
    let text = refused(&json!({"microbatchs": 4}));
    assert_eq!(
        text,
        "there is no configuration key \"microbatchs\" (its value is 4); the nearest one is \"microbatches\""
    );
    assert!(!refused(&json!({"zzz": 1})).contains("nearest"));
    for (other, name) in OTHER_NAMES {
        let nearest = format!("the nearest one is {name:?}");
        assert!(refused(&json!({other: 2})).ends_with(&nearest), "{other}");
    }
}

#[test]
fn an_error_names_the_key_the_value_and_what_is_allowed() {
    let cases = [
        (
            json!({"microbatches": 0}),
            "the configuration key \"microbatches\" is 0; allowed: an integer of 1 or more",
        ),
        (
            json!({"microbatches": 2.0}),
            "\"microbatches\" is 2.0; allowed: an integer",
        ),
        (json!({"ddp": 1}), "\"ddp\" is 1; allowed: true or false"),
        (
            json!({"pipeline": "only_forward"}),
            "\"only_forward\"; allowed: \"interleaved\" or \"simple\"",
        ),
        (
            json!({"memory_weight": 1.5}),
            "\"memory_weight\" is 1.5; allowed: a number from 0 to 1, or null",
        ),
        (
            json!({"placement_strategy": "DPD"}),
            "\"DPD\"; allowed: \"cluster\", \"spread\", or a permutation",
        ),
        (
            json!({"stall_timeout_seconds": 0}),
            "\"stall_timeout_seconds\" is 0; allowed: a number from 0.001 to 1000000000",
        ),
        (
            json!({"bind_interface_address": "eth0"}),
            "\"eth0\"; allowed: an IP address, or null",
        ),
        (
            json!({"microbatches": null}),
            "\"microbatches\" is null; allowed: an integer",
        ),
    ];
    for (given, expected) in cases {
        let text = refused(&given);
        assert!(text.contains(expected), "{text}\n{expected}");
    }
}

#[test]
fn a_feature_that_is_not_built_is_refused_with_the_reason() {
    let cases = [
        (
            json!({"contiguous": false}),
            "\"contiguous\" is false, but it is a TensorFlow-only key and this library is for PyTorch; allowed until then: true, its default",
        ),
        (json!({"horovod": true}), "TensorFlow-only"),
        (
            json!({"transport": "mpi"}),
            "allowed: \"auto\" or \"tcp\" or \"ucx\" or \"shared_memory\"",
        ),
        (json!({"encrypt": "yes"}), "allowed: true or false"),
        (json!({"comm_buffer_bytes": -1}), "an integer of 0 or more"),
    ];
    for (given, expected) in cases {
        let text = refused(&given);
        assert!(text.contains(expected), "{text}\n{expected}");
    }
}

#[test]
fn a_partition_is_loaded_from_a_file() {
    let both = json!({"load_partition": true, "partition_file": "partition.json"});
    assert!(parse(&both).is_ok());
    assert!(parse(&json!({"partition_file": "partition.json"})).is_ok());
    assert!(refused(&json!({"load_partition": true})).contains("no \"partition_file\""));
}

#[test]
fn transports_that_are_built_may_be_asked_for() {
    for transport in ["auto", "tcp", "shared_memory"] {
        let config = parse(&json!({"transport": transport})).expect("built");
        assert_eq!(config.transport, transport);
    }
}

#[test]
fn a_count_may_be_written_as_a_float() {
    assert!(parse(&json!({"sdp_reduce_bucket_size": 5e8, "sdp_max_live_parameters": 1e9})).is_ok());
    assert!(refused(&json!({"sdp_reduce_bucket_size": 5.5})).contains("an integer of 1 or more"));
}

#[test]
fn partitions_is_the_same_key_as_pipeline_parallel_degree() {
    for given in [
        json!({"partitions": 3}),
        json!({"pipeline_parallel_degree": 3}),
        json!({"partitions": 3, "pipeline_parallel_degree": 3}),
    ] {
        let config = parse(&given).expect("three stages");
        assert_eq!((config.partitions, config.pipeline_parallel_degree), (3, 3));
        assert_eq!(config.active_microbatches, 5);
    }
    let text = refused(&json!({"partitions": 3, "pipeline_parallel_degree": 2}));
    assert!(
        text.contains("\"partitions\" is 3 and \"pipeline_parallel_degree\" is 2"),
        "{text}"
    );
}

#[test]
fn optimize_sets_the_default_of_memory_weight() {
    let weight = |given| parse(&given).expect("a good configuration").memory_weight;
    let close = |left: f64, right: f64| assert!((left - right).abs() < 1e-12, "{left} {right}");
    close(weight(json!({"optimize": "speed"})), 0.2);
    close(weight(json!({"optimize": "memory"})), 0.8);
    close(
        weight(json!({"optimize": "speed", "memory_weight": 1})),
        1.0,
    );
    close(
        weight(json!({"optimize": "speed", "memory_weight": null})),
        0.2,
    );
}

#[test]
fn manual_placement_needs_a_default_partition() {
    let text = refused(&json!({"auto_partition": false}));
    assert_eq!(
        text,
        "default_partition must be supplied if auto_partition is set to False!"
    );
    assert!(parse(&json!({"auto_partition": false, "default_partition": 0})).is_ok());
    let text = refused(&json!({"partitions": 2, "default_partition": 2}));
    assert!(
        text.contains("\"default_partition\" is 2; allowed: 0 to 1"),
        "{text}"
    );
}

#[test]
fn a_limit_that_the_simple_schedule_would_not_keep_is_refused_if_set() {
    let with = |active: Value| {
        parse(
            &json!({"partitions": 2, "microbatches": 8, "pipeline": "simple", "active_microbatches": active}),
        )
    };
    assert!(
        with(json!(3))
            .expect_err("3 is below 8")
            .to_string()
            .contains("\"active_microbatches\" is 3")
    );
    assert!(with(json!(8)).is_ok());
    assert!(
        with(json!(4)).is_ok(),
        "a key at its default is always accepted"
    );
    assert_eq!(with(Value::Null).expect("not set").active_microbatches, 4);
    let interleaved = parse(&json!({"microbatches": 8, "active_microbatches": 1}));
    assert_eq!(
        interleaved
            .expect("kept by this schedule")
            .active_microbatches,
        1
    );
}

#[test]
fn with_looped_stages_twice_as_many_microbatches_as_ranks_are_in_flight() {
    let with = |active: Value| {
        parse(&json!({"partitions": 4, "microbatches": 8, "pipeline": "looped", "active_microbatches": active}))
            .expect("a good configuration")
    };
    let config = with(Value::Null);
    assert_eq!(config.pipeline, Pipeline::Named(PipelineName::Looped));
    assert_eq!(config.active_microbatches, 8);
    assert!(!config.active_microbatches_given());
    assert_eq!(Config::parse(&config.to_json()), Ok(config));
    assert!(with(json!(6)).active_microbatches_given());
}

#[test]
fn keys_of_data_parallelism_need_it() {
    let text = refused(&json!({"ddp_port": 29500}));
    assert_eq!(
        text,
        "the configuration key \"ddp_port\" is 29500, which needs \"ddp\" to be true"
    );
    assert!(refused(&json!({"shard_optimizer_state": true})).contains("needs \"ddp\""));
    assert!(refused(&json!({"ddp_dist_backend": "nccl"})).contains("needs \"ddp\""));
    assert!(parse(&json!({"ddp_dist_backend": "auto"})).is_ok());
}

#[test]
fn a_world_of_several_replicas_needs_ddp() {
    let config = parse(&json!({"partitions": 2})).expect("a good configuration");
    assert!(config.check_world(2).is_ok());
    let text = config.check_world(4).expect_err("two replicas").to_string();
    assert!(
        text.contains("world size 4") && text.contains("\"ddp\" to be true"),
        "{text}"
    );
    let text = config
        .check_world(3)
        .expect_err("half a replica")
        .to_string();
    assert!(text.contains("3 is not divisible"), "{text}");
    let config = parse(&json!({"partitions": 2, "ddp": true})).expect("a good configuration");
    assert_eq!(config.check_world(4).expect("two replicas").world_size(), 4);
}

#[test]
fn the_fingerprint_leaves_out_what_ranks_may_set_for_themselves() {
    let fingerprint = |given| parse(&given).expect("a good configuration").fingerprint();
    let first = fingerprint(json!({"bind_interface_address": "10.0.0.1", "secret_file": "a"}));
    let second = fingerprint(json!({"bind_interface_address": "::1"}));
    assert_eq!(first, second);
    let third = fingerprint(json!({"seed": 1, "microbatches": 2}));
    let difference = Config::difference(&first, &third);
    assert_eq!(difference, ["microbatches: 1 and 2", "seed: 0 and 1"]);
}

#[test]
fn what_is_no_object_is_refused() {
    assert!(
        Config::parse("[1]")
            .expect_err("a list")
            .to_string()
            .contains("is a list; allowed: an object")
    );
    assert!(
        Config::parse("{")
            .expect_err("no JSON")
            .to_string()
            .contains("not valid JSON")
    );
}

#[test]
fn a_list_starts_every_microbatch_once_in_either_phase() {
    let list = |entries: Value| json!({"microbatches": 2, "pipeline": entries});
    let good = json!([
        [1, "forward"],
        [0, "forward"],
        [0, "backward"],
        [1, "backward"]
    ]);
    let config = parse(&list(good)).expect("a good list");
    let Pipeline::List(entries) = &config.pipeline else {
        panic!("a list was given")
    };
    assert_eq!(entries[0], (1, Phase::Forward));
    assert_eq!(Config::parse(&config.to_json()), Ok(config));
    for (entries, said) in [
        (
            json!([[0, "forward"], [2, "forward"]]),
            "[2, \"forward\"] at index 1; allowed: microbatches from 0 to 1",
        ),
        (
            json!([[1, "backward"]]),
            "[1, \"backward\"] at index 0; allowed: a backward only behind [1, \"forward\"]",
        ),
        (
            json!([[0, "forward"], [0, "forward"]]),
            "at index 1; allowed: each entry once; it stands at index 0 too",
        ),
        (
            json!([[0, "forward"], [0, "sideways"]]),
            "[0,\"sideways\"] at index 1; allowed: a microbatch from 0 to 1",
        ),
        (
            json!([[0, "forward"], [0, "backward"]]),
            "a list of 2 entries without [1, \"forward\"]",
        ),
    ] {
        let text = refused(&list(entries));
        assert!(text.contains(said), "{text}");
    }
}

#[test]
fn a_list_keeps_to_the_microbatches_that_may_be_in_flight() {
    let entries = json!([
        [0, "forward"],
        [1, "forward"],
        [0, "backward"],
        [1, "backward"]
    ]);
    let given =
        |active| json!({"microbatches": 2, "active_microbatches": active, "pipeline": entries});
    assert!(parse(&given(2)).is_ok());
    assert!(refused(&given(1)).contains("2 microbatches in flight at once; allowed: 2 or more"));
}

#[test]
fn a_deterministic_server_leaves_the_partition_to_the_model_alone() {
    let refines = |given| {
        parse(&given)
            .expect("a good configuration")
            .refine_partition
    };
    assert!(refines(json!({})));
    assert!(!refines(json!({"deterministic_server": true})));
    assert!(refines(
        json!({"deterministic_server": true, "refine_partition": true})
    ));
    assert!(!refines(json!({"refine_partition": false})));
}
