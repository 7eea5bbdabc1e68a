"""All that the original library's interface has is here, or refused by name with a reason."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.compat import accepted
from tests.compat.interface import KEYS, OLD_VERSIONS, SYMBOLS, Key
from tests.compat.lookup import refused_symbols, wrong_symbols
from tests.jobs.forked import ROOT
from tests.jobs.patience import HANG_SECONDS
from tests.jobs.ranks import outputs_of_ranks

_NOT_OFFERED = """
import smdistributed.modelparallel.torch as smp
for name in ("merge", "accumulate"):
    try:
        getattr(smp.StepOutput([]), name)
    except AttributeError as error:
        print(name in str(error) and ".outputs" in str(error))
try:
    import smdistributed.modelparallel.tensorflow
except ImportError as error:
    print("Shardwright is for PyTorch" in str(error))
"""


def test_every_symbol_is_there_with_its_arguments() -> None:
    assert wrong_symbols() == []


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_every_key_takes_what_it_took_or_says_why_not(key: Key) -> None:
    assert accepted.problems(key) == []
    assert (key.refused == "") or key.refused_values


def test_no_row_is_there_twice() -> None:
    symbols, keys = [one.name for one in (*SYMBOLS, *OLD_VERSIONS)], [key.name for key in KEYS]
    assert len(set(symbols)) == len(symbols)
    assert len(set(keys)) == len(keys)


def test_what_is_refused_says_so() -> None:
    assert all(symbol.refused for symbol in OLD_VERSIONS)
    assert {"smp.StepOutput.merge", "tensorflow.CheckpointManager"} <= {one.name for one in refused_symbols()}
    (out,) = outputs_of_ranks("-c", _NOT_OFFERED, ranks=0)
    assert out.split() == ["True"] * 3


def test_the_script_has_every_key_on_its_command_line() -> None:
    of_others = ("Keys of TensorFlow", "Keys of the second version, `torch.sagemaker`")
    wanted = {key.name for key in KEYS if not key.refused and key.group not in of_others}
    listed = "from tests.compat.plain import script_of; print(*script_of('gpt2').CONFIGURATION)"
    (out,) = outputs_of_ranks("-c", listed, ranks=0, folder=ROOT)
    assert set(out.split()) == wanted


def test_the_guides_tables_are_up_to_date() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.compat.page", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert result.returncode == 0, result.stderr
