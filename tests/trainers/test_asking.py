"""Asking about losses leaves buffers as the division of the model, which the first question brings, has made them."""

from __future__ import annotations

import shardwright as smp
import torch
from shardwright.huggingface.asking import Answer, ask
from shardwright.job.runtime import Runtime
from torch import nn

from tests.frames.job import Job, in_process_ranks
from tests.step.test_first_failure import Counted


def test_the_first_question_undoes_what_it_did_to_buffers_and_not_what_dividing_the_model_did() -> None:
    def main(runtime: Runtime) -> list[float]:
        net = nn.Sequential(Counted(), Counted())
        smp.set_partition(net[1], 1)
        model = smp.DistributedModel(net)
        model.register_post_partition_hook(lambda model, _: [one.fill_(40.0) for _, one in model.local_named_buffers()])
        inputs = torch.ones(4, 2, dtype=torch.float64)

        def losses(_: str, microbatches: int) -> list[float]:
            @smp.step(microbatches=microbatches)
            def look(model: smp.DistributedModel, inputs: torch.Tensor) -> torch.Tensor:
                loss: torch.Tensor = model(inputs).square().mean()
                return loss

            return [float(one) for one in look(model, inputs).outputs]

        found: list[float] = []
        for _ in range(2):
            answer = ask(losses, {"rows": [0.5, 0.5]}, model, {torch.float64})
            assert isinstance(answer, Answer)
            assert answer.weights == "rows"
            found.extend(float(one) for _, one in model.local_named_buffers())
        return found

    with in_process_ranks():
        job = Job(2)
        assert job.run(main, {}, 60) == [[40.0, 40.0]] * 2
        job.close()
