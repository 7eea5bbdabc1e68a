"""``save_pretrained`` and ``load_pretrained`` of divided models, against ``transformers`` alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.layouts.rank import build
from tests.checkpoint.pretrained import inputs, undivided
from tests.checkpoint.running import PIPELINE, TENSOR, case, run
from tests.jobs.patience import HANG_SECONDS

#: Loads a model by ``transformers`` alone, and writes its logits.
ALONE = """
import sys, torch, transformers
from safetensors.torch import load_file, save_file
kind = {"GPT-2": transformers.AutoModelForCausalLM, "T5": transformers.AutoModelForSeq2SeqLM}[sys.argv[3]]
model, about = kind.from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(name.partition(".")[0] == "shardwright" for name in sys.modules)
assert not about["missing_keys"] and not about["unexpected_keys"] and not about["mismatched_keys"], about
assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
logits = model.eval()(**load_file(sys.argv[2])).logits.detach()
save_file({"logits": logits.clone()}, sys.argv[2] + ".logits")
"""

LAYOUTS = pytest.mark.parametrize("config", [PIPELINE, TENSOR], ids=["pipeline", "tensor"])
MODELS = pytest.mark.parametrize("model", ["GPT-2", "T5"])


@pytest.mark.covering(1)
@MODELS
@LAYOUTS
def test_transformers_alone_loads_what_a_divided_model_saves(
    config: dict[str, Any], model: str, tmp_path: Path
) -> None:
    """With the logits of the job; tied weights are there once, in several files."""
    folder, given = tmp_path / "saved" / "model", tmp_path / "given"
    shard = 5_000 if model == "GPT-2" else "5GB"
    run(2, case("save_folder", config, folder=str(folder), model=model, shard=shard))
    save_file(inputs(model), given)
    ran = subprocess.run(
        [sys.executable, "-c", ALONE, folder, given, model], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert ran.returncode == 0, ran.stderr
    expected = load_file(folder / "logits")["value"]
    tolerance = 1e-12 if config is PIPELINE else 1e-6
    torch.testing.assert_close(load_file(f"{given}.logits")["logits"], expected, rtol=tolerance, atol=tolerance)
    files = sorted(folder.glob("model*.safetensors"))
    assert (len(files) > 1) == (model == "GPT-2")
    saved = [pair for file in files for pair in load_file(file).items()]
    state = load_file(folder / "state")
    assert len(saved) == len(dict(saved))
    assert "lm_head.weight" not in dict(saved)
    for name, value in saved:
        assert torch.equal(value, state[name]), name


@MODELS
@LAYOUTS
def test_a_divided_model_loads_what_transformers_saves(config: dict[str, Any], model: str, tmp_path: Path) -> None:
    theirs = build(model)
    theirs.save_pretrained(tmp_path, max_shard_size="10KB" if model == "T5" else "5GB")  # type: ignore[operator]
    save_file({"logits": undivided(theirs, inputs(model))}, tmp_path / "logits")
    run(2, *(case("load_folder", config, folder=str(tmp_path), model=model, late=late) for late in (False, True)))


def test_a_model_without_its_head_is_loaded_into_one_with_it(tmp_path: Path) -> None:
    """Names differ by a prefix then."""
    theirs: Any = build("GPT-2")
    theirs.transformer.save_pretrained(tmp_path)
    save_file({"logits": undivided(theirs, inputs("GPT-2"))}, tmp_path / "logits")
    run(2, case("load_folder", PIPELINE, folder=str(tmp_path), model="GPT-2", late=False))


def test_other_models_are_refused(tmp_path: Path) -> None:
    theirs: Any = build("T5")
    theirs.save_pretrained(tmp_path / "theirs")
    run(2, case("refused_folders", PIPELINE, folder=str(tmp_path / "theirs")))


def test_tied_weights_that_differ_in_the_files_are_refused(tmp_path: Path) -> None:
    """``transformers`` would not tie them any more; the divided model has one tensor for both."""
    theirs: Any = build("GPT-2")
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    save_file({"logits": undivided(theirs, inputs("GPT-2"))}, tmp_path / "logits")
    run(2, case("load_folder", PIPELINE, folder=str(tmp_path), model="GPT-2", late=False))
    tensors["lm_head.weight"][3, 1] += 1.0
    save_file(tensors, file, metadata={"format": "pt"})
    run(2, *(case("untied_folder", PIPELINE, folder=str(tmp_path), late=late) for late in (False, True)))


@pytest.mark.parametrize("damage", ["cut", "header", "index"])
def test_a_damaged_file_is_named(damage: str, tmp_path: Path) -> None:
    from shardwright import CheckpointError
    from shardwright.checkpoints.pretrained.folder import Folder

    theirs: Any = build("GPT-2")
    theirs.save_pretrained(tmp_path, max_shard_size="10KB")
    first, second, *_ = sorted(tmp_path.glob("model-*.safetensors"))
    assert Folder(str(tmp_path)).places
    if damage == "cut":
        first.write_bytes(first.read_bytes()[:-8])
    elif damage == "header":
        first.write_bytes(b"\xff" * 8 + first.read_bytes()[8:])
    else:
        first.write_bytes(second.read_bytes())
    with pytest.raises(CheckpointError, match=first.name):
        Folder(str(tmp_path))
