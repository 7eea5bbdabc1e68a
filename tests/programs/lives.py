"""What was done with a program's model before it is wrapped: in plain torch and divided, the same."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import nn

from tests.programs.log import Log, log_of_run

if TYPE_CHECKING:
    from tests.programs.program import Program

#: It was evaluated, trained for a step whose gradients were dropped, copied after that, or given another one's state.
LIVES = ("evaluated", "trained", "copied", "loaded")


def lived(program: Program, model: nn.Module, batch: torch.Tensor) -> nn.Module:
    """The model after the life that the program names; nothing of it is in the log of the run."""
    log, log_of_run[0] = log_of_run[0], Log(plain=True)
    try:
        part = batch.chunk(program.microbatches)[0]
        if program.life in ("trained", "copied"):
            program.step(model, part, "", torch.autograd.backward)
            model.zero_grad()
        if program.life in ("evaluated", "copied", "loaded"):
            model.eval()
            with torch.no_grad():
                program.evaluate(model, part, "")
            model.train()
        if program.life == "loaded":
            model.load_state_dict(program.other_state(1))
        if program.life == "copied":
            # What a scripted module computes is not copied with its parameters.
            scripted = any(isinstance(one, torch.jit.ScriptModule) for one in model.modules())
            model = model if scripted else copy.deepcopy(model)
    finally:
        log_of_run[0] = log
    return model
