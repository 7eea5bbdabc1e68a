"""Checkpoints of ``torch.distributed.checkpoint``: imported and exported, and nothing in them is run."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright._core import CheckpointReader
from shardwright.checkpoints.dtypes import DTYPES
from shardwright.command import main
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.filesystem import _StorageInfo

from tests.checkpoint.running import PARAMETERS, PIPELINE, SHARDED, case, run
from tests.checkpoint.torch_program import alone
from tests.jobs.forked import ROOT
from tests.jobs.patience import HANG_SECONDS


def plain(*words: object, ranks: int = 1) -> None:
    """Run plain torch in processes of its own."""
    command = [sys.executable, "-m", "tests.checkpoint.torch_program", *map(str, words)]
    environment = [{**os.environ, "RANK": str(rank)} for rank in range(ranks)]
    running = [subprocess.Popen(command, env=each, cwd=ROOT, stderr=subprocess.PIPE, text=True) for each in environment]
    for each in running:
        _, err = each.communicate(timeout=HANG_SECONDS)
        assert each.returncode == 0, err


@pytest.mark.parametrize("layout", ["nested", "flat"])
def test_what_sharded_processes_have_trained_is_resumed_over_ranks(layout: str, tmp_path: Path) -> None:
    """Model and optimizer, by name: two processes with fully_shard, then pipelines, shards and one process."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    plain("save", theirs, layout, ranks=2)
    smp.import_torch_checkpoint(theirs, ours, "t")
    assert CheckpointReader(ours, "t").verify() == []
    folder = str(ours)
    run(
        2,
        *(case("resume_foreign", PIPELINE, folder=folder, late=late) for late in (False, True)),
        case("resume_foreign", SHARDED, folder=folder, late=True),
        case("resume_foreign", PARAMETERS, folder=folder, late=False),
        case("other_groups_are_refused", PIPELINE, folder=folder),
    )
    run(1, case("resume_foreign", folder=folder, late=False))


@pytest.mark.parametrize("config", [PIPELINE, SHARDED], ids=["pipeline", "shards"])
def test_plain_torch_goes_on_from_what_a_job_has_saved(config: dict[str, Any], tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    run(2, case("save_for_foreign", config, folder=str(saved)))
    for layout in ("nested", "flat"):
        smp.export_torch_checkpoint(saved, tmp_path / layout, flatten_optimizer_state_dict=layout == "flat")
        plain("go_on", tmp_path / layout, layout)


def test_a_round_trip_changes_nothing(tmp_path: Path) -> None:
    """All that a checkpoint has, but streams, is there again, byte for byte."""
    run(2, case("save_and_go_on", PIPELINE, folder=str(tmp_path / "a")))
    smp.export_torch_checkpoint(tmp_path / "a", tmp_path / "theirs")
    smp.import_torch_checkpoint(tmp_path / "theirs", tmp_path / "b", "a")
    before, after = (CheckpointReader(tmp_path / name) for name in ("a", "b"))
    known = [json.loads(reader.manifest) for reader in (before, after)]
    aliases = {one["name"]: one["of"] for one in known[0]["aliases"]}
    kinds = [{one["name"]: (one["dtype"], one["shape"]) for one in manifest["tensors"]} for manifest in known]
    wanted = {name: kind for name, kind in kinds[0].items() if not name.startswith(("rng/", "user/"))}
    found = {name: kind for name, kind in kinds[1].items() if not name.startswith("user/")}
    assert aliases
    assert found == wanted | {name: wanted[of] for name, of in aliases.items()}
    for name, (dtype, shape) in found.items():
        pair = [torch.empty(shape, dtype=getattr(torch, DTYPES[dtype])) for _ in range(2)]
        region = ([0] * len(shape), shape, None)
        before.read([(aliases.get(name, name), pair[0], region)])
        after.read([(name, pair[1], region)])
        assert torch.equal(*pair), name
    run(2, case("resume_content", PIPELINE, folder=str(tmp_path / "b")))


def test_a_state_dict_of_a_model_alone_is_imported(tmp_path: Path) -> None:
    model = alone(1)
    checkpoint.save(dict(model.state_dict()), checkpoint_id=tmp_path / "theirs", no_dist=True)
    smp.import_torch_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    manifest = json.loads(CheckpointReader(tmp_path / "ours", "imported").manifest)
    assert {one["name"] for one in manifest["tensors"]} == {f"model/{name}" for name in model.state_dict()}
    with pytest.raises(smp.CheckpointError, match=r"'imported' already: replace=True"):
        smp.import_torch_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    smp.import_torch_checkpoint(tmp_path / "theirs", tmp_path / "ours", replace=True)
    with pytest.raises(smp.CheckpointError, match="already: replace=True"):
        smp.export_torch_checkpoint(tmp_path / "ours", tmp_path / "theirs")


def test_state_by_number_is_refused(tmp_path: Path) -> None:
    """Numbers of parameters say nothing under another division."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    content = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    checkpoint.save(content, checkpoint_id=tmp_path / "theirs", no_dist=True)
    with pytest.raises(smp.CheckpointError, match=r"state of '0', .*get_state_dict\(model, optimizer\)"):
        smp.import_torch_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists() or not os.listdir(tmp_path / "ours")


class Harmful:
    """Runs a command when it is read by pickle."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_nothing_in_metadata_is_run(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    checkpoint.save({"a": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
    whole = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(pickle.dumps(Harmful(f"touch {tmp_path}/run")))
    with pytest.raises(smp.CheckpointError, match=r"names (posix|os)\.system, which no metadata"):
        smp.import_torch_checkpoint(folder, tmp_path / "ours")
    for name in ("builtins.eval", "torch.load", "torch.serialization.load", "pathlib.os.system"):
        module, _, function = name.rpartition(".")
        (folder / ".metadata").write_bytes(f"c{module}\n{function}\n.".encode())
        with pytest.raises(smp.CheckpointError, match="so it is refused"):
            smp.import_torch_checkpoint(folder, tmp_path / "ours")
    for damaged in (b"", whole[:-9], whole[: len(whole) // 2], b"\x80\x04N."):
        (folder / ".metadata").write_bytes(damaged)
        with pytest.raises(smp.CheckpointError, match="is damaged"):
            smp.import_torch_checkpoint(folder, tmp_path / "ours")
    assert not (tmp_path / "run").exists()


def test_no_value_is_run(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    content = {"model": {"a": torch.ones(3)}, "more": Harmful(f"touch {tmp_path}/run")}
    checkpoint.save(content, checkpoint_id=folder, no_dist=True)
    with pytest.raises(smp.CheckpointError, match=r"'more' is a pickle of more than tensors and plain values"):
        smp.import_torch_checkpoint(folder, tmp_path / "ours")
    assert not (tmp_path / "run").exists()


def test_files_outside_of_the_folder_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    checkpoint.save({"a": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        assert isinstance(place, _StorageInfo)
        place.relative_path = f"../{place.relative_path}"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(smp.CheckpointError, match="is no name of a file in the folder"):
        smp.import_torch_checkpoint(folder, tmp_path / "ours")


def test_a_tensor_of_which_a_part_is_missing_is_refused(tmp_path: Path) -> None:
    """It would be read as whatever memory holds."""
    folder = tmp_path / "theirs"
    checkpoint.save({"a": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (file,) = folder.glob("*.distcp")
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    with pytest.raises(smp.CheckpointError, match="cannot read"):
        smp.import_torch_checkpoint(folder, tmp_path / "ours")
    file.write_bytes(whole)
    metadata.state_dict_metadata["a"].size = torch.Size([4])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(smp.CheckpointError, match="parts of tensor 'a' are missing"):
        smp.import_torch_checkpoint(folder, tmp_path / "ours")


def test_the_command_says_how_to_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "theirs"
    checkpoint.save({"a": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
    assert main(["checkpoint", "import", str(folder), str(tmp_path / "ours")]) == 2
    assert "smp.import_torch_checkpoint" in capsys.readouterr().err
    with pytest.raises(smp.CheckpointError, match=r"no checkpoint of torch\.distributed\.checkpoint"):
        smp.import_torch_checkpoint(tmp_path, tmp_path / "ours")


def test_addresses_in_stores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(smp.CheckpointError, match=r"in an object store.*reshard"):
        smp.import_torch_checkpoint(tmp_path, "s3://bucket/run")
    with pytest.raises(smp.CheckpointError, match=r"in an object store.*reshard"):
        smp.export_torch_checkpoint(tmp_path, "s3://bucket/run")
    assert list(tmp_path.iterdir()) == []
