"""Jobs and ``transformers`` exchange models by the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from shardwright.command import main

from tests.checkpoint.exchanged import batch, gpt2
from tests.checkpoint.running import PIPELINE, TENSOR, case, run
from tests.jobs.patience import HANG_SECONDS

#: Loads a model by ``transformers`` alone, and writes its logits.
ALONE = """
import sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
model, about = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(name.partition(".")[0] == "shardwright" for name in sys.modules)
assert not about["missing_keys"] and not about["unexpected_keys"] and not about["mismatched_keys"], about
ids = torch.arange(28).reshape(4, 7) % 97
save_file({"logits": model.eval()(ids).logits.detach().clone()}, sys.argv[2])
"""


def command(*words: object) -> None:
    """Run ``shardwright checkpoint``, which has to succeed."""
    assert main(["checkpoint", *map(str, words)]) == 0


@pytest.mark.parametrize("config", [PIPELINE, TENSOR], ids=["pipeline", "tensor"])
def test_what_a_job_has_trained_is_loaded_by_transformers_alone(config: dict[str, int], tmp_path: Path) -> None:
    """With the same logits as one process has with the state dict."""
    saved, full, logits = tmp_path / "saved", tmp_path / "full", tmp_path / "logits"
    run(2, case("save_trained", config, folder=str(saved)))
    command("export", saved, "--full", full)
    ran = subprocess.run(
        [sys.executable, "-c", ALONE, full, logits], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert ran.returncode == 0, ran.stderr
    expected = load_file(saved / "logits")["value"]
    assert expected.shape == (4, 7, 97)
    assert torch.equal(load_file(logits)["logits"], expected)


def test_what_save_pretrained_writes_is_resumed_over_ranks(tmp_path: Path) -> None:
    """It leaves out the tied weight, and has no optimizer; each rank reads its part."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    model = gpt2(5).double().eval()
    model.save_pretrained(theirs)
    assert "lm_head.weight" not in load_file(theirs / "model.safetensors")
    command("import", theirs, ours)
    with torch.no_grad():
        save_file({"logits": model(batch()).logits}, ours / "logits")
    run(
        2,
        *(case("take_imported", PIPELINE, folder=str(ours), late=late) for late in (False, True)),
        case("imported_has_no_optimizer", PIPELINE, folder=str(ours)),
    )
    run(1, case("take_imported", folder=str(ours), late=False))
