"""Scripts written after the public examples train, save and resume; ``make compat`` runs all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.published.runs import BARS, EXAMPLES, Example, compare

_HERE = Path(__file__).parent / "published"
#: One of each model, dtype and division.
_CHOSEN = [("gpt2", "bf16", "sharded"), ("gptneo", "fp16", "pipeline with tensor"), ("bert", "fp32", "pipeline")]


def test_each_model_has_each_dtype_in_each_division_but_float16_in_shards() -> None:
    found = {(one.model, one.dtype, one.division) for one in EXAMPLES}
    divisions = {"pipeline", "tensor", "sharded", "pipeline with tensor"}
    wanted = {(model, dtype, one) for model in ("gpt2", "gptneo", "bert") for dtype in BARS for one in divisions}
    assert found == {one for one in wanted if one[1:] != ("fp16", "sharded")}


def test_scripts_know_the_library_by_its_old_name_only() -> None:
    for name in ("language_model", "bert"):
        text = (_HERE / f"{name}.py").read_text()
        assert "import smdistributed.modelparallel.torch as smp" in text
        assert "shardwright" not in text


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dtype", "division"), _CHOSEN)
def test_a_script_computes_and_resumes_as_it_should(model: str, dtype: str, division: str, tmp_path: Path) -> None:
    assert not compare(Example(model, dtype, division), tmp_path).why
