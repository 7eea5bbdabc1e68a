"""``shardwright convert``: what a configuration of accelerate or DeepSpeed becomes, and that no key of it is lost."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config import cluster
from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.constants import FSDP_SHARDING_STRATEGY
from hypothesis import given, settings
from hypothesis import strategies as st
from shardwright.command import main
from shardwright.config import load_config
from shardwright.convert.accelerate_keys import ACCELERATE, SAGEMAKER
from shardwright.convert.conversion import SECTIONS, convert
from shardwright.convert.deepspeed_keys import DEEPSPEED
from shardwright.convert.keys import Key, Outcome
from shardwright.convert.planning import STRATEGIES
from shardwright.convert.rendering import command, configuration, script
from shardwright.errors import ConfigError
from shardwright.launcher.command import parser

from tests.jobs.patience import HANG_SECONDS

from .configurations import CASES, ZERO_3, Case

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coming-from" / "accelerate-configuration.md"


def leaves(given: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for key, value in given.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{before}{key}.")
        else:
            yield f"{before}{key}"


def of_fsdp(**keys: Any) -> dict[str, Any]:
    return {"distributed_type": "FSDP", "num_processes": 4, "fsdp_config": keys}


def of_deepspeed(**keys: Any) -> dict[str, Any]:
    return {"distributed_type": "DEEPSPEED", "num_processes": 4, "deepspeed_config": keys}


def converted(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    status = main(["convert", "--json", *map(str, arguments)])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_accelerate_config_writes_is_converted_whole(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ClusterConfig(**case.file).to_yaml_file(tmp_path / "config.yaml")
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    if case.deepspeed is not None:
        (tmp_path / "zero3.json").write_text(json.dumps(case.deepspeed))
    status, told = converted(capsys, tmp_path / "config.yaml")
    assert (status, told["whole"]) == (case.status, True)
    assert told["configuration"] == case.config
    assert set(case.lines) <= set(told["script"])
    compile("\n".join(told["script"]), "script", "exec")
    # Ours take both.
    words = [word for word in shlex.split(case.command) if not word.startswith("CUDA_VISIBLE_DEVICES=")]
    assert told["command"] == words
    given = parser().parse_args(words[2:])
    ranks = int(given.nproc_per_node) * int(given.nnodes.partition(":")[0])
    load_config(told["configuration"], {}, {}).check_world(ranks)
    # Each key of the file has one row.
    expected = [*leaves(written)]
    if case.deepspeed is not None:
        expected += [f"zero3.json: {path}" for path in leaves(case.deepspeed)]
    assert sorted(row["key"] for row in told["keys"]) == sorted(expected)

    assert main(["convert", str(tmp_path / "config.yaml")]) == case.status
    text = capsys.readouterr().out
    assert f"\n    {case.command}\n" in text
    assert all(f"    {line}\n" in text for line in case.lines)
    assert all(f"    {path}" in text for path in expected)


def names(keys: tuple[Key, ...]) -> set[str]:
    return {name for each in keys for name in each.names}


def test_every_key_of_accelerate_is_known() -> None:
    """Drawn from accelerate itself: the fields of a file, the flags that its mappings become, what it asks for."""
    fields = {*ClusterConfig.__dataclass_fields__, *SageMakerConfig.__dataclass_fields__}
    assert fields - names(ACCELERATE) - names(SAGEMAKER) == set(SECTIONS)

    flags = {action.dest for action in launch_command_parser()._actions}
    for section, (prefix, keys, _) in SECTIONS.items():
        if prefix:
            of_section = {flag for flag in flags if flag.startswith(prefix)}
            assert len(of_section) > 5, section
            assert of_section <= names(keys)
    groups = {group.title: group._group_actions for group in launch_command_parser()._action_groups}
    assert {action.dest for action in groups["DeepSpeed Arguments"]} <= names(SECTIONS["deepspeed_config"][1])

    asked = re.findall(r'(\w+_config)\[(prefix \+ )?"(\w+)"\]', inspect.getsource(cluster.get_cluster_input))
    assert len(asked) > 40
    for section, is_short, name in asked:
        if section in SECTIONS:
            prefix, keys, _ = SECTIONS[section]
            assert (prefix + name if is_short else name) in names(keys)


def test_every_kind_of_job_and_every_strategy_of_accelerate_is_known() -> None:
    for kind in DistributedType:
        assert convert({"distributed_type": kind.value, "num_processes": 2}).rows
    assert list(STRATEGIES) == FSDP_SHARDING_STRATEGY


VALUES = st.sampled_from(
    [True, False, None, "auto", 0, 1, 2, 8, 0.5, 1e-3, "none", "cpu", "nvme", "fp16", "yes", [], {}]
)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_key_is_lost_whatever_it_says(data: st.DataObject) -> None:
    """What is converted has a row for each key, known or not, and keys that the library takes or refuses in words."""
    if data.draw(st.booleans()):
        section = data.draw(st.sampled_from([*SECTIONS]))
        kind = data.draw(st.sampled_from(["FSDP", "DEEPSPEED", "MEGATRON_LM", "MULTI_GPU"]))
        known = [*names(SECTIONS[section][1]), "of_tomorrow"]
        inner = data.draw(st.dictionaries(st.sampled_from(sorted(known)), VALUES, max_size=6))
        outer = data.draw(st.dictionaries(st.sampled_from(["mixed_precision", "of_tomorrow", "gpu_ids"]), VALUES))
        given = {"distributed_type": kind, "num_processes": 4, section: inner, **outer}
    else:
        given = {"zero_optimization": {"stage": data.draw(st.integers(0, 3))}}
        for path in data.draw(st.lists(st.sampled_from([*sorted(names(DEEPSPEED)), "of.tomorrow"]), max_size=6)):
            around: Any = given
            *outer_names, last = path.split(".")
            for name in outer_names:
                around = around.setdefault(name, {}) if isinstance(around, dict) else {}
            if isinstance(around, dict) and not isinstance(around.get(last), dict):
                around[last] = data.draw(VALUES)
    done = refused = None
    try:
        done = convert(given, None, 4)
    except ConfigError as error:
        refused = str(error)
    if done is None:
        assert refused is not None
        assert "allowed" in refused
        return
    rows = {row.key: row for row in done.rows}
    assert set(leaves(given)) <= set(rows)
    for path in leaves(given):
        if "tomorrow" in path:
            assert rows[path].outcome is Outcome.NO_COUNTERPART
    if "smp.init" in rows:  # a number of the file is not in the range of ours
        with pytest.raises(ConfigError):
            load_config(configuration(done.plan), {}, {}).check_world(done.plan.ranks)
    else:
        load_config(configuration(done.plan), {}, {}).check_world(done.plan.ranks)
    compile("\n".join(script(done.plan)), "script", "exec")
    parser().parse_args(command(done.plan)[1][2:])


@pytest.mark.parametrize(
    ("file", "key", "outcome", "config"),
    [
        (of_fsdp(fsdp_offload_params=True), "fsdp_config.fsdp_offload_params", "no counterpart", "offload_optimizer"),
        (of_fsdp(fsdp_ignored_modules="head"), "fsdp_config.fsdp_ignored_modules", "no counterpart", ""),
        (of_fsdp(sharding_strategy="NO_SHARD"), "fsdp_config.sharding_strategy", "becomes", "ddp"),
        ({**of_fsdp(), "mixed_precision": "fp8"}, "mixed_precision", "no counterpart", "bf16"),
        ({**of_fsdp(), "num_processes": 5, "num_machines": 2}, "num_processes", "no counterpart", ""),
        ({**of_fsdp(fsdp_version=2), "parallelism_config": {"parallelism_config_dp_shard_size": 2}},
         "parallelism_config.parallelism_config_dp_shard_size", "no counterpart", ""),
        ({**of_fsdp(fsdp_version=2), "parallelism_config": {"parallelism_config_cp_size": 2}},
         "parallelism_config.parallelism_config_cp_size", "no counterpart", ""),
        ({"distributed_type": "MULTI_NPU", "num_processes": 2}, "distributed_type", "no counterpart", "ddp"),
        (of_deepspeed(zero_stage=1), "deepspeed_config.zero_stage", "becomes", "shard_optimizer_state"),
        (of_deepspeed(offload_param_device="cpu"), "deepspeed_config.offload_param_device", "no counterpart", ""),
        (of_deepspeed(offload_optimizer_device="nvme", offload_optimizer_nvme_path="/fast"),
         "deepspeed_config.offload_optimizer_nvme_path", "becomes", "offload_directory"),
        (of_deepspeed(), "deepspeed_config.gradient_clipping", "becomes", "sdp_gradient_clipping"),
        ({**of_deepspeed(), "fsdp_config": {"fsdp_version": 2}}, "fsdp_config.fsdp_version", "not needed", ""),
        ({"distributed_type": "MULTI_GPU", "num_processes": 2, "colour": "red"}, "colour", "no counterpart", ""),
    ],
)  # fmt: skip
def test_what_would_be_lost_in_silence_is_told(
    file: dict[str, Any], key: str, outcome: str, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(file))
    status, told = converted(capsys, tmp_path / "config.yaml")
    (row,) = [row for row in told["keys"] if row["key"] == key]
    assert row["outcome"] == outcome
    assert status == (1 if outcome == "no counterpart" else 0)
    assert not config or config in told["configuration"]


@pytest.mark.parametrize(
    ("strategy", "hosts", "degree", "stage"),
    [
        (True, 1, 8, 3),
        ("FULL_SHARD", 2, 8, 3),
        ("2", 1, 8, 2),
        ("HYBRID_SHARD", 2, 4, 3),
        ("HYBRID_SHARD_ZERO2", 4, 2, 2),
        (4, 2, 4, 3),
    ],
)
def test_hybrid_sharding_is_within_hosts(strategy: str | int, hosts: int, degree: int, stage: int) -> None:
    plan = convert({**of_fsdp(fsdp_sharding_strategy=strategy), "num_processes": 8, "num_machines": hosts}).plan
    keys = configuration(plan)
    assert (keys["sharded_data_parallel_degree"], keys["sdp_stage"]) == (degree, stage)


@pytest.mark.parametrize(
    ("stage", "precision", "expected", "line"),
    [
        (0, "fp16", {"fp16"}, "dynamic_loss_scale=True"),
        (1, "fp16", {"fp16", "shard_optimizer_state"}, "dynamic_loss_scale=True"),
        (2, "fp16", {"fp16", "shard_optimizer_state"}, "dynamic_loss_scale=True"),
        (3, "fp16", {"sharded_data_parallel_degree"}, "GradScaler(init_scale=4096.0, growth_interval=7)"),
        (1, "bf16", {"bf16", "shard_optimizer_state"}, ""),
        (2, "bf16", {"bf16", "sharded_data_parallel_degree"}, ""),
        (3, "bf16", {"bf16", "sharded_data_parallel_degree"}, ""),
    ],
)
def test_stages_of_zero_go_with_the_precisions(stage: int, precision: str, expected: set[str], line: str) -> None:
    scaling = {"loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 7} if precision == "fp16" else {}
    done = convert({precision: {"enabled": True, **scaling}, "zero_optimization": {"stage": stage}}, None, 4)
    all_of = {"fp16", "bf16", "shard_optimizer_state", "sharded_data_parallel_degree"}
    assert done.is_whole
    assert all_of & set(configuration(done.plan)) == expected
    assert line in "\n".join(script(done.plan))
    assert precision != "fp16" or '"init_scale": 4096.0' in "\n".join(script(done.plan)) or stage == 3


@pytest.mark.parametrize(
    ("sizes", "ranks", "expected"),
    [
        ((64, 4, 2), None, (8, 2, 64)),
        ((64, 4, 0), 4, (4, 4, 64)),
        ((64, 0, 2), 4, (4, 2, 64)),
        ((64, 0, 0), 4, (4, 1, 64)),
        ((0, 3, 5), 2, (2, 5, 30)),
    ],
)  # fmt: skip
def test_batches_are_those_of_deepspeed(
    sizes: tuple[int, int, int], ranks: int | None, expected: tuple[int, ...]
) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = {key: size for key, size in zip(keys, sizes, strict=True) if size}
    done = convert({**given, "zero_optimization": {"stage": 2}}, None, ranks)
    assert done.is_whole
    assert (done.plan.ranks, done.plan.microbatches, done.plan.samples) == expected


def test_batches_that_contradict_each_other_are_told() -> None:
    done = convert(
        {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}, None, 2
    )
    assert [row.key for row in done.rows if row.outcome is Outcome.NO_COUNTERPART] == ["train_batch_size"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("distributed_type: MULTI_GPU\n", "give --num-processes"),
        (
            "distributed_type: MULTI_GPU\nnum_processes: many\n",
            'the key num_processes is "many"; allowed: a whole number',
        ),
        ("distributed_type: SOMETHING\nnum_processes: 2\n", 'distributed_type is "SOMETHING"; allowed: FSDP'),
        ("compute_environment: LOCAL_MACHINE\n", "has no distributed_type"),
        ("a: 1\n", "neither a configuration of accelerate"),
        ("- 1\n", "has no keys and values"),
        ("a: [\n", "is not valid YAML"),
        ("distributed_type: NO\ndistributed_type: FSDP\n", 'the key "distributed_type" is there twice'),
        ("zero_optimization: {stage: 4}\ntrain_batch_size: 1\ntrain_micro_batch_size_per_gpu: 1\n", "allowed: 0 to 3"),
    ],
)
def test_what_nobody_takes_is_refused_in_one_line(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(text)
    assert main(["convert", str(tmp_path / "config.yaml")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("shardwright convert: ")
    assert told in said.err
    assert said.err.count("\n") == 1


def test_misuse_is_told_and_help_explains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--colour"], [str(tmp_path / "none.yaml")], ["a", "--num-processes", "0"], [str(tmp_path)]):
        assert main(["convert", *arguments]) == 2
        assert capsys.readouterr().err.startswith("shardwright convert: ")
    for arguments in (["convert", "--help"], ["help", "convert"]):
        assert main(arguments) == 0
        assert "Exit status" in capsys.readouterr().out
    assert main(["--help"]) == 0
    assert "convert FILE" in capsys.readouterr().out


def test_yaml_without_pyyaml_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("distributed_type: NO\n")
    (tmp_path / "config.json").write_text('{"distributed_type": "NO"}')
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert main(["convert", str(tmp_path / "config.yaml")]) == 2
    assert "pip install pyyaml" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "config.json")]) == 0


def test_the_example_of_the_page_is_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGE.read_text()
    (file,) = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (printed,) = re.findall(r"^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "accelerate_config.yaml").write_text(file)
    monkeypatch.chdir(tmp_path)
    assert main(["convert", "accelerate_config.yaml"]) == 0
    assert capsys.readouterr().out == printed
    (trained,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (made,) = re.findall(r"^    smp.init\(.*?^    \)$", printed, re.DOTALL | re.MULTILINE)
    assert made.replace("\n    ", "\n").strip() in trained


def test_the_tables_of_the_page_are_those_of_the_command() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "tools" / "conversion_table.py", "--check"],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert result.returncode == 0, result.stderr


def test_a_file_of_deepspeed_is_found_where_accelerate_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(of_deepspeed(deepspeed_config_file="zero.json", zero_stage=1)))
    assert main(["convert", str(tmp_path / "config.json")]) == 2
    assert 'cannot read "zero.json"' in capsys.readouterr().err
    (tmp_path / "zero.json").write_text(json.dumps({**ZERO_3, "gradient_clipping": 0.25}))
    status, told = converted(capsys, tmp_path / "config.json")
    assert (status, told["configuration"]["sdp_gradient_clipping"]) == (0, 0.25)
    (row,) = [row for row in told["keys"] if row["key"] == "deepspeed_config.zero_stage"]
    assert "DeepSpeed's file says it" in row["text"]
