"""Precisions of float32 that a script sets under older and newer names, some of which contradict the others."""

import json
from pathlib import Path

import pytest
import torch

from tests.jobs.ranks import outputs_of_ranks

PROGRAM = Path(__file__).parent / "precision_program.py"
OLDER = {
    "untouched": "",
    "high": "torch.set_float32_matmul_precision('high')",
    "allow_tf32": "torch.backends.cuda.matmul.allow_tf32 = True; torch.backends.cudnn.allow_tf32 = False",
    "mixed older": "torch.set_float32_matmul_precision('medium'); torch.backends.cuda.matmul.allow_tf32 = False",
}
NEWER = {
    "cuda matmul": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "generic": "torch.backends.fp32_precision = 'tf32'",
    "mkldnn matmul": "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "cudnn conv": "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
}
KNOWN = OLDER | NEWER if hasattr(torch._C, "_get_fp32_precision_getter") else OLDER


@pytest.mark.parametrize("code", KNOWN.values(), ids=KNOWN)
def test_precisions_are_those_of_one_process(code: str) -> None:
    found = [json.loads(output.splitlines()[-1]) for output in outputs_of_ranks(PROGRAM, code)]
    assert [each["wrong"] for each in found] == [[], []]
    assert found[0]["sent"] > 3 * 4
