"""``torch.distributed.tensor.parallel``: a plan of column-wise and row-wise linear layers for each block."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benches.tensor_parallel.model import COLUMNS, ROWS, Model, State, plain_body, plain_state


class WithDTensor:
    """See :class:`benches.tensor_parallel.rank.Side`."""

    def __init__(self, weights: State) -> None:
        """Divide the blocks of the whole model."""
        mesh = init_device_mesh("cpu", (2,))
        self.model = Model(plain_body())
        self.model.load_state_dict(plain_state(weights))
        for block in self.model.body.children():
            plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
            parallelize_module(block, mesh, plan)

    def step(self, microbatches: tuple[torch.Tensor, ...]) -> float:
        """Add up the mean gradient over microbatches; the mean loss."""
        losses = []
        for ids in microbatches:
            loss = self.model(ids)
            (loss / len(microbatches)).backward()
            losses.append(loss.detach())
        return float(torch.stack(losses).mean())

    def gradients(self, expected: State) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Names, gradients and what they have to be; made whole, which is a collective."""
        found = []
        for name, right in plain_state(expected).items():
            gradient = self.model.get_parameter(name).grad
            assert gradient is not None
            found.append((name, gradient.full_tensor() if isinstance(gradient, DTensor) else gradient, right))
        return found

    def barrier(self) -> None:
        """Wait for the other rank."""
        dist.barrier()

    def close(self) -> None:
        """Leave."""
        dist.destroy_process_group()
