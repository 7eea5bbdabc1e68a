"""Sees to it that the package is not mixed with another one of its name."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

_DISTRIBUTION = "shardwright-smdistributed"

#: The modules of this distribution.
MODULES = frozenset(
    {
        "__init__",
        "_alone",
        "backend/__init__",
        "backend/exceptions",
        "tensorflow/__init__",
        "test/__init__",
        "test/torch/__init__",
        "test/torch/utils",
        "torch/__init__",
        "torch/_files",
        "torch/_optimizer",
        "torch/_start",
        "torch/_steps",
        "torch/_trainer",
        "torch/amp",
        "torch/exceptions",
        "torch/model",
        "torch/nn/__init__",
        "torch/nn/huggingface/__init__",
        "torch/nn/huggingface/bert",
        "torch/nn/huggingface/gpt2",
        "torch/nn/huggingface/gptj",
        "torch/nn/huggingface/gptneo",
        "torch/nn/huggingface/gptneox",
        "torch/nn/huggingface/roberta",
        "torch/nn/utils",
        "torch/optimizers",
        "torch/patches/__init__",
        "torch/patches/checkpoint",
        "torch/state_mod",
        "torch/utils",
    }
)
#: The suffixes of files that Python imports.
_SUFFIXES = (".py", ".pyc", ".so")


def check_alone(here: Path) -> None:
    """Raise if another package of this name is installed, in the same folder or in another one.

    Args:
        here: The folder of this package.

    Raises:
        ImportError: There is another one; the message has a file of it.
    """
    others = [*_strangers(here), *_elsewhere(here)]
    if others:
        owners = importlib.metadata.packages_distributions().get("smdistributed", [])
        named = ", ".join(sorted({one for one in owners if one != _DISTRIBUTION})) or "the other package"
        raise ImportError(
            f"smdistributed.modelparallel is provided by {_DISTRIBUTION} and by another package ({others[0]}), and the "
            f"two cannot be mixed: uninstall {named}, or {_DISTRIBUTION}"
        )


def _strangers(here: Path) -> list[Path]:
    """Return files of modules in the package's folder that are not of this distribution."""
    files = (one for one in sorted(here.rglob("*")) if one.suffix in _SUFFIXES)
    own = {here / f"{name}.py" for name in MODULES}
    return [one for one in files if one not in own and one.parent.name != "__pycache__"]


def _elsewhere(here: Path) -> list[Path]:
    """Return further packages of the name, in other folders of the namespace."""
    import smdistributed

    found = (Path(folder, here.name) for folder in smdistributed.__path__)
    return [one for one in found if one.is_dir() and not one.samefile(here)]
