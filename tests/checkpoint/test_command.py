"""``shardwright checkpoint export`` and ``import``, beside the libraries whose layout it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from shardwright._core import CheckpointReader, CheckpointWriter
from shardwright.command import main
from transformers import GPT2Config, GPT2LMHeadModel

from tests.checkpoint.test_bindings import DTYPES, bits, description, whole

#: Loads an export by transformers alone, and prints the logits' bytes.
ALONE = """
import sys, torch
from transformers import AutoModelForCausalLM
model, about = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(name.partition(".")[0] == "shardwright" for name in sys.modules)
assert not about["missing_keys"] and not about["unexpected_keys"] and not about["mismatched_keys"], about
assert model.lm_head.weight is model.transformer.wte.weight
print(model.eval()(torch.arange(7)[None]).logits.detach().numpy().tobytes().hex())
"""


def gpt2() -> GPT2LMHeadModel:
    """A small model with tied weights."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=16, n_embd=64, n_layer=2, n_head=2)).eval()


def saved(folder: Path, model: GPT2LMHeadModel) -> None:
    """Save a model by rows in two parts, as jobs do, with an optimizer's state beside it."""
    state = model.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in reversed(state.items())}
    aliases = [
        {"name": f"model/{name}", "of": f"model/{names[id(tensor)]}"}
        for name, tensor in state.items()
        if names[id(tensor)] != name
    ]
    assert aliases == [{"name": "model/lm_head.weight", "of": "model/transformer.wte.weight"}]
    writer = CheckpointWriter(folder, "t")
    reports = []
    for rank in range(2):
        pieces = []
        for name, tensor in state.items():
            if names[id(tensor)] != name:
                continue
            rows = tensor.detach().chunk(2)[rank].contiguous()
            offset = [0 if rank == 0 else tensor.shape[0] - rows.shape[0], *[0] * (tensor.dim() - 1)]
            pieces.append((f"model/{name}", rows, list(tensor.shape), (offset, list(rows.shape), None)))
        pieces.append((f"optimizer/{rank}", torch.randn(9), [9], ([0], [9], None)))
        reports.append(writer.write_part(f"part-{rank}.safetensors", pieces))
    content = {"huggingface_config": {**model.config.to_dict(), "architectures": ["GPT2LMHeadModel"]}}
    writer.commit(description(aliases=aliases, user_content=content), reports)


def command(*words: object) -> None:
    """Run ``shardwright checkpoint``, which has to succeed."""
    assert main(["checkpoint", *map(str, words)]) == 0


@pytest.mark.parametrize("options", [(), ("--max-shard-size", "100KB")], ids=["one file", "an index"])
def test_an_export_is_loaded_by_transformers_alone(tmp_path: Path, options: tuple[str, ...]) -> None:
    """In a process that does not import the library; the logits are the same bit by bit."""
    model = gpt2()
    saved(tmp_path / "saved", model)
    command("export", tmp_path / "saved", "--full", tmp_path / "full", *options)
    files = {path.name for path in (tmp_path / "full").iterdir()}
    assert ("model.safetensors.index.json" in files) == bool(options)
    ran = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path / "full")], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    logits = model(torch.arange(7)[None]).logits.detach()
    assert bytes.fromhex(ran.stdout.splitlines()[-1]) == logits.numpy().tobytes()


def test_what_save_pretrained_writes_is_imported(tmp_path: Path) -> None:
    """The tensors and the configuration of a model in several files, and back by an export."""
    model = gpt2()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    command("import", tmp_path / "theirs", tmp_path / "ours", "--ranks", 2)
    reader = CheckpointReader(tmp_path / "ours")
    assert reader.verify() == []
    manifest = json.loads(reader.manifest)
    assert manifest["tag"] == "imported"
    assert manifest["user_content"]["huggingface_config"]["n_embd"] == 64
    state = model.state_dict()
    del state["lm_head.weight"]
    assert {tensor["name"] for tensor in manifest["tensors"]} == {f"model/{name}" for name in state}
    for name, tensor in state.items():
        into = torch.empty_like(tensor)
        reader.read([(f"model/{name}", into, whole(into))])
        assert torch.equal(into, tensor), name
    command("export", tmp_path / "ours", "--full", tmp_path / "full")
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "full")
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_every_dtype_and_shape_is_exported_and_imported(tmp_path: Path) -> None:
    """Bit by bit, with scalars and tensors without elements, beside what ``safetensors`` writes and reads."""
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 5),
        "no rows/": torch.zeros(3, 0),
    }
    tensors["x" * 5000] = torch.ones(2)
    for dtype in DTYPES:
        element = torch.empty(0, dtype=dtype).element_size()
        choices = torch.randint(0, 2 if dtype == torch.bool else 256, (6 * element,), dtype=torch.uint8)
        tensors[str(dtype)] = choices.view(dtype).reshape(2, 3)
    writer = CheckpointWriter(tmp_path / "saved", "t")
    pieces: list[Any] = [(f"model/{name}", one, list(one.shape), whole(one)) for name, one in tensors.items()]
    writer.commit(description(), [writer.write_part("part", pieces)])
    command("export", tmp_path / "saved", "--full", tmp_path / "full")
    found = load_file(tmp_path / "full" / "model.safetensors")
    assert found.keys() == tensors.keys()
    (tmp_path / "theirs").mkdir()
    save_file(tensors, tmp_path / "theirs" / "model.safetensors")
    command("import", tmp_path / "theirs", tmp_path / "ours", "--ranks", 3)
    reader = CheckpointReader(tmp_path / "ours")
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bits(found[name]), bits(tensor)), name
        into = torch.empty_like(tensor)
        reader.read([(f"model/{name}", into, whole(into))])
        assert torch.equal(bits(into), bits(tensor)), name


def test_a_disk_that_is_full_leaves_nothing_of_an_export(tmp_path: Path) -> None:
    """A limit on files' sizes stands for it: the export tells how far it came, and only the checkpoint is left."""
    saved(tmp_path / "saved", gpt2())
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
        "from shardwright.command import main; sys.exit(main(sys.argv[1:]))"
    )
    words = ["checkpoint", "export", str(tmp_path / "saved"), "--full", str(tmp_path / "full")]
    ran = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "model.safetensors: 100000 of " in ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
