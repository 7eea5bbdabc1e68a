"""``torch.distributed.tensor.parallel``: a plan of column-wise and row-wise linear layers for each block."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benches.tensor_parallel.model import COLUMNS, ROWS, Model, State, plain_body, plain_state
from benches.tensor_parallel.torch_side import TorchSide


class WithDTensor(TorchSide):
    """See :class:`benches.tensor_parallel.rank.Side`."""

    def __init__(self, weights: State) -> None:
        """Divide the blocks of the whole model."""
        mesh = init_device_mesh("cpu", (2,))
        self.model = Model(plain_body())
        self.model.load_state_dict(plain_state(weights))
        for block in self.model.body.children():
            plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
            parallelize_module(block, mesh, plan)

    def gradients(self, expected: State) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Names, gradients and what they have to be; made whole, which is a collective."""
        found = []
        for name, right in plain_state(expected).items():
            gradient = self.model.get_parameter(name).grad
            assert gradient is not None
            found.append((name, gradient.full_tensor() if isinstance(gradient, DTensor) else gradient, right))
        return found
