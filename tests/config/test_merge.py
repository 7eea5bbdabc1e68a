import copy
import enum
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
from shardwright.config import check_world, load_config, log_lowered
from shardwright.errors import ConfigError


def refused(config: object, environ: dict[str, str] | None = None, **keys: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(config, keys, environ or {})  # type: ignore[arg-type]
    return str(caught.value)


def environment(**keys: object) -> dict[str, str]:
    return {"SM_HP_MP_PARAMETERS": json.dumps(keys)}


def test_every_key_is_an_attribute_also_when_it_is_not_given() -> None:
    config = load_config(None, {}, {})
    assert hasattr(config, "fp16")
    assert (config.fp16, config.microbatches, config.memory_weight) == (False, 1, 0.8)
    assert config._match_weights is False
    assert all(getattr(config, name) == value for name, value in config.to_dict().items())


def test_keyword_arguments_add_to_the_dict() -> None:
    config = load_config({"partitions": 2}, {"microbatches": 4}, {})
    assert (config.partitions, config.pipeline_parallel_degree, config.microbatches) == (2, 2, 4)


def test_a_key_given_twice_must_have_one_value() -> None:
    assert load_config({"seed": 1}, {"seed": 1}, {}).seed == 1
    assert "'seed' is 1 in config and 2 as a keyword argument" in refused({"seed": 1}, seed=2)


def test_the_environment_overrides_the_script_key_by_key() -> None:
    config = load_config({"microbatches": 2, "seed": 3}, {"pipeline": "simple"}, environment(microbatches=8))
    assert (config.microbatches, config.seed, config.pipeline) == (8, 3, "simple")


def test_the_environment_overrides_a_key_under_either_of_its_names() -> None:
    config = load_config({"pipeline_parallel_degree": 2}, {}, environment(partitions=4))
    assert (config.partitions, config.pipeline_parallel_degree) == (4, 4)


@pytest.mark.parametrize("text", ["", "  ", "{}"])
def test_an_empty_environment_changes_nothing(text: str) -> None:
    assert load_config({"seed": 3}, {}, {"SM_HP_MP_PARAMETERS": text}) == load_config({"seed": 3}, {}, {})


@pytest.mark.parametrize("text", ["[1]", "4", "{'seed': 1}"])
def test_an_environment_that_is_no_json_object_is_refused(text: str) -> None:
    assert "SM_HP_MP_PARAMETERS" in refused({}, {"SM_HP_MP_PARAMETERS": text})


class Number(enum.IntEnum):
    TWO = 2


@pytest.mark.parametrize("value", [object(), float("nan"), {1}, b"2", Number.TWO, [2], {"a": 1}])
def test_a_value_that_json_does_not_have_is_refused_with_its_key_and_type(value: object) -> None:
    text = refused({"microbatches": value})
    assert "'microbatches'" in text
    assert type(value).__name__ in text


class Unprintable:
    def __repr__(self) -> str:
        raise OSError("no such luck")


@pytest.mark.parametrize(
    "value",
    ["\ud800", Unprintable(), 10**5000, [["a" * 100_000, "forward"]]],
    ids=["lone surrogate", "repr() that raises", "more digits than Python shows", "long"],
)
@pytest.mark.parametrize("key", ["seed", "secret_file", "nonsense"])
def test_a_value_that_is_hard_to_show_is_refused_with_its_key_in_a_short_text(key: str, value: object) -> None:
    text = refused({key: value})
    assert key in text
    assert len(text) < 500


def test_a_key_that_no_encoding_has_is_refused() -> None:
    assert "a configuration key is '\\ud800'" in refused({"\ud800": 1})


def test_a_program_is_read_from_regular_files_of_bounded_size_only(tmp_path: Path) -> None:
    large, pipe = tmp_path / "large.csv", tmp_path / "pipe"
    with large.open("wb") as file:
        file.truncate(1 << 30)
    os.mkfifo(pipe)
    assert "it has 1,073,741,824 bytes; allowed: 67,108,864" in refused({"pipeline": str(large)})
    for path in ("/dev/zero", str(pipe), str(tmp_path)):
        text = refused({"pipeline": path})
        assert "pipeline" in text
        assert "it is no regular file" in text
    assert len(refused({"pipeline": "a" * 100_000})) < 1000


def test_a_world_size_that_does_not_fit_is_refused_in_the_words_of_the_keys_that_were_given() -> None:
    for given, named in (({"partitions": 2}, True), ({"pipeline_parallel_degree": 2}, False)):
        with pytest.raises(ConfigError, match="world size 1 is not divisible") as caught:
            check_world(load_config(given, {}, {}), 1, given, {}, {})
        assert ('"partitions", which was given' in str(caught.value)) is named


def test_a_key_that_is_no_text_and_a_config_that_is_no_mapping_are_refused() -> None:
    assert "a configuration key is 3" in refused({3: 1})
    assert "config is a list" in refused([("seed", 1)])


def test_an_unknown_key_is_refused_with_the_nearest_name() -> None:
    assert 'the nearest one is "microbatches"' in refused({"microbatch": 4})


@pytest.mark.parametrize("key", ["pp", "pp_degree", "num_stages"])
def test_a_key_as_other_libraries_call_it_is_refused_with_the_name_it_has_here(key: str) -> None:
    with pytest.raises(ConfigError, match=f'"{key}" .*; the nearest one is "pipeline_parallel_degree"'):
        smp.init({}, **{key: 2})
    assert not smp.is_initialized()


def test_refusals_are_configuration_errors_that_name_key_value_and_what_is_allowed() -> None:
    text = refused({"memory_weight": 2})
    assert text == 'the configuration key "memory_weight" is 2; allowed: a number from 0 to 1, or null'


def test_the_effective_configuration_cannot_be_changed() -> None:
    config = load_config(None, {}, {})
    with pytest.raises(AttributeError, match="cannot change after"):
        config.seed = 1
    with pytest.raises(AttributeError, match="cannot change after"):
        del config.seed
    with pytest.raises(AttributeError, match="no configuration key 'fp8'"):
        _ = config.fp8
    assert not hasattr(config, "fp8")


def test_the_effective_configuration_copies_pickles_and_compares() -> None:
    config = load_config({"seed": 5}, {}, {})
    assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config))
    assert hash(copy.copy(config)) == hash(config)
    assert config != load_config(None, {}, {})
    assert "seed=5" in repr(config)


def test_the_scripts_dict_is_left_alone() -> None:
    given = {"partitions": 2, "seed": 1}
    load_config(given, {"microbatches": 2}, environment(pipeline_parallel_degree=3))
    assert given == {"partitions": 2, "seed": 1}


def test_fast_mode_without_static_mode_is_refused() -> None:
    assert '"static_mode": True' in refused({"fast_mode": True})
    assert '"static_mode": True' in refused({"fast_mode": True}, environment(static_mode=False))
    assert load_config({"fast_mode": True, "static_mode": True}, {}, {}).fast_mode
    assert not load_config({"fast_mode": False}, {}, {}).fast_mode


def test_elastic_degrees_are_lowered_to_the_number_of_ranks(caplog: pytest.LogCaptureFixture) -> None:
    """What was lowered is said; without a number of ranks, nothing is."""
    keys = {"pipeline_parallel_degree": 4, "elastic_degrees": "pipeline_parallel_degree", "ddp": True}
    asked = load_config(keys, {}, {})
    fitted = load_config(keys, {}, {}, 3)
    assert (asked.pipeline_parallel_degree, fitted.pipeline_parallel_degree, fitted.active_microbatches) == (4, 3, 5)
    assert load_config(keys, {}, {}, 8).pipeline_parallel_degree == 4
    with caplog.at_level("WARNING", "shardwright"):
        log_lowered(fitted, asked, 3)
        log_lowered(asked, asked, 4)
    assert [record.getMessage() for record in caplog.records] == [
        "pipeline_parallel_degree is 3 instead of 4, which does not fit 3 ranks (elastic_degrees)"
    ]


@pytest.mark.parametrize("ddp", [{}, {"ddp": False}])
def test_tensor_parallelism_is_refused_by_name_without_replicas(ddp: dict[str, Any]) -> None:
    words = 'the configuration key "tensor_parallel_degree" is 2, which needs "ddp" to be true'
    with pytest.raises(ConfigError, match=words):
        load_config({"tensor_parallel_degree": 2, **ddp}, {}, {}, 2)
    with pytest.raises(ConfigError, match=words):
        smp.init({"tensor_parallel_degree": 2, **ddp})
    assert not smp.is_initialized()
