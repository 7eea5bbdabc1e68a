"""The layers of models of ``transformers`` under the name that ``smp.nn.DistributedTransformer`` has for its own."""

from __future__ import annotations

from torch import nn

from shardwright.nn.transformer import DistributedTransformerLayer


def name_layers(module: nn.Module) -> None:
    """Let ``seq_layers`` of each module whose list of layers has been replaced by distributed layers be that list.

    Scripts of the interface look for the layers there, to checkpoint and to place them. It is one more name of the
    list, and no further part of the module.
    """
    for holder in module.modules():
        lists = [one for one in holder.children() if isinstance(one, nn.ModuleList) and len(one)]
        replaced = [one for one in lists if all(isinstance(each, DistributedTransformerLayer) for each in one)]
        if len(replaced) == 1 and not hasattr(holder, "seq_layers"):
            vars(holder)["seq_layers"] = replaced[0]
