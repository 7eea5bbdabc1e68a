"""Frames and cuts: exact backward over a model whose modules are on several ranks.

Every execution of a request, and of the step function itself, has a :class:`Frame`. Everything that runs on this
rank inside it is one ordinary autograd graph; the frame lists, in order, the remote calls made from it. At a
remote call, tensors are *cut*: the graph ends there, and gradient edges are kept instead of tensors. The backward
of a frame runs its nodes level by level between the remote calls, each node once, with its whole gradient.
"""

from shardwright.frames.backward import RemoteBackward, close_calls, run_backward
from shardwright.frames.cut import Slot, cut, edge_of, owning_edge
from shardwright.frames.frame import Call, Frame, Passed, current_frame, in_frame
from shardwright.frames.leaves import Leaves
from shardwright.frames.weights import WeightGradients

__all__ = [
    "Call",
    "Frame",
    "Leaves",
    "Passed",
    "RemoteBackward",
    "Slot",
    "WeightGradients",
    "close_calls",
    "current_frame",
    "cut",
    "edge_of",
    "in_frame",
    "owning_edge",
    "run_backward",
]
