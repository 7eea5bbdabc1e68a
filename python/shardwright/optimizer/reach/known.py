"""How far the step of an optimizer looks when it updates an element, for classes that are known."""

from __future__ import annotations

import enum

import torch
from torch.optim import Optimizer

from shardwright.optimizer.sharding.elementwise import has_own_step, is_elementwise, keeps_the_rule

#: What a class, or an optimizer, sets to say that its update of an element depends on that element alone.
DECLARATION = "updates_elements_independently"


class Reach(enum.IntEnum):
    """What the update of an element may depend on."""

    #: What concerns the element itself: its value, gradient and state.
    ELEMENT = 0
    #: All of its parameter, as by its norm, its rows or its shape.
    PARAMETER = 1
    #: Other parameters, as by a norm over all gradients.
    MODEL = 2


#: Classes of ``torch.optim`` besides those of `is_elementwise`. Not every version of PyTorch has all.
_OF_TORCH = {
    "SparseAdam": Reach.ELEMENT,
    "Adafactor": Reach.PARAMETER,
    "Muon": Reach.PARAMETER,
    "LBFGS": Reach.MODEL,
}
#: Classes of other packages, some of which run on a GPU alone, so that a probe on the CPU says nothing.
_OF_OTHERS = {
    ("transformers", "Adafactor"): Reach.PARAMETER,
    ("apex", "FusedAdam"): Reach.ELEMENT,
    ("apex", "FusedSGD"): Reach.ELEMENT,
    ("apex", "FusedAdagrad"): Reach.ELEMENT,
    ("apex", "FusedNovoGrad"): Reach.PARAMETER,
    ("apex", "FusedLAMB"): Reach.MODEL,
    ("deepspeed", "FusedAdam"): Reach.ELEMENT,
    ("deepspeed", "DeepSpeedCPUAdam"): Reach.ELEMENT,
    # Their state is one number for each element only with 32 bits; with 8, elements of a block share a factor.
    ("bitsandbytes", "Adam32bit"): Reach.ELEMENT,
    ("bitsandbytes", "AdamW32bit"): Reach.ELEMENT,
    ("bitsandbytes", "Lion32bit"): Reach.ELEMENT,
    ("bitsandbytes", "PagedAdam32bit"): Reach.ELEMENT,
    ("bitsandbytes", "PagedAdamW32bit"): Reach.ELEMENT,
    ("bitsandbytes", "PagedLion32bit"): Reach.ELEMENT,
}


def known_reach(kind: type[Optimizer]) -> Reach | None:
    """Return how far the step of an optimizer's class looks; None if that is not known.

    Args:
        kind: The class, before ``smp.DistributedOptimizer`` wrapped it. A subclass of a known one may do anything,
            unless it overrides nothing by which that updates.
    """
    if is_elementwise(kind) or keeps_the_rule(kind):
        return Reach.ELEMENT
    name, package = kind.__name__, kind.__module__.partition(".")[0]
    if getattr(torch.optim, name, None) is kind and name in _OF_TORCH:
        return _OF_TORCH[name]
    if package == "bitsandbytes":
        return _OF_OTHERS.get((package, name), Reach.PARAMETER)
    return _OF_OTHERS.get((package, name))


def declares_elements(optimizer: Optimizer, kind: type[Optimizer]) -> bool:
    """Return whether an optimizer declares that its update of an element depends on that element alone.

    Args:
        optimizer: The optimizer.
        kind: Its class, before ``smp.DistributedOptimizer`` wrapped it. A declaration of a class says nothing of a
            subclass that has a step of its own.
    """
    if DECLARATION in vars(optimizer):
        return bool(vars(optimizer)[DECLARATION])
    first = next((one for one in kind.__mro__ if DECLARATION in vars(one) or has_own_step(one)), None)
    return first is not None and bool(vars(first).get(DECLARATION, False))
