"""One of the processes that start: a rank of a pipeline of two, or the one of plain PyTorch.

usage: python -m benches.start.rank ours|plain SOCKET, as a rank of a job
"""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benches.ranks import serve

if TYPE_CHECKING:
    import torch
    from torch import nn

NUM_BLOCKS, WIDTH, NUM_HEADS = 6, 256, 8
VOCABULARY, SEQUENCE = 8192, 64
BATCH, MICROBATCHES = 8, 4
SEED = 1


def _make_model() -> nn.Module:
    """A GPT-2 of 6.9 M parameters with a tied head."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(SEED)
    config = GPT2Config(
        n_layer=NUM_BLOCKS,
        n_embd=WIDTH,
        n_head=NUM_HEADS,
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        loss_type="ForCausalLM",
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def _make_batch() -> torch.Tensor:
    """Token ids, shape (BATCH, SEQUENCE)."""
    import torch

    return torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(SEED))


class Plain:
    """One process: gradients accumulate over the microbatches."""

    def __init__(self) -> None:
        """Nothing is imported yet."""
        self.rank = int(os.environ["RANK"])
        self._run: Callable[[], Any] | None = None

    def load(self) -> None:
        """Import all that the script imports; what PyTorch and transformers import later is part of the step."""
        import torch
        import transformers.models.gpt2.modeling_gpt2  # noqa: F401

        torch.set_num_threads(1)

    def build(self) -> None:
        """Build the model, and collect the garbage of imports.

        That takes longer than the trace. Whether it falls into the first step or before it is chance, for both sides.
        """
        self._build()
        gc.collect()

    def _build(self) -> None:
        model, ids = _make_model(), _make_batch()

        def run() -> float:
            total = 0.0
            for part in ids.chunk(MICROBATCHES):
                loss = model(input_ids=part, labels=part).loss
                (loss / MICROBATCHES).backward()
                total += float(loss.detach())
            return total / MICROBATCHES

        self._run = run

    def step(self) -> dict[str, float]:
        """When a step began and ended here, in seconds of a clock that all processes share, and its loss."""
        assert self._run is not None, "build comes first"
        began = time.monotonic()
        loss = self._run()
        return {"began": began, "ended": time.monotonic(), "loss": loss}

    def close(self) -> None:
        """Nothing is open."""


class _Phases(logging.Handler):
    """Keeps what the library logs of the phases of its start."""

    def __init__(self) -> None:
        """Nothing was logged yet."""
        super().__init__()
        self.seconds: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        found = re.fullmatch(r"rank 0: (.*) took ([\d.]+) s", record.getMessage())
        if found:
            self.seconds[found[1]] = float(found[2])


class Ours(Plain):
    """A rank of a pipeline of two."""

    def __init__(self) -> None:
        """Listen to what the library logs."""
        super().__init__()
        self._phases = _Phases()
        logger = logging.getLogger("shardwright")
        logger.addHandler(self._phases)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False

    def load(self) -> None:
        """Import the library, too."""
        super().load()
        import shardwright  # noqa: F401

    def init(self) -> float:
        """How many seconds ``smp.init`` took on this rank."""
        import shardwright as smp

        began = time.monotonic()
        smp.init(pipeline_parallel_degree=2, microbatches=MICROBATCHES)
        return time.monotonic() - began

    def _build(self) -> None:
        import shardwright as smp

        model, ids = smp.DistributedModel(_make_model()), _make_batch()

        @smp.step
        def step(ids: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
            model.backward(loss)
            return loss

        self._run = lambda: float(step(ids).reduce_mean())

    def phases(self) -> dict[str, float]:
        """How many seconds each phase of the start took; on rank 0 only."""
        return self._phases.seconds

    def close(self) -> None:
        """Leave the job."""
        import shardwright as smp

        smp.shutdown()


def main() -> None:
    kind, address = sys.argv[1:]
    serve({"ours": Ours, "plain": Plain}[kind](), address)


if __name__ == "__main__":
    main()
