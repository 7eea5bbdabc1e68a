"""``import smdistributed.modelparallel.torch as smp``: Shardwright, as scripts for the original library call it.

Everything that ``shardwright`` has is here too, so that such a script can use it.
"""

from importlib import import_module

from shardwright import *  # noqa: F403
from shardwright import __all__ as _names
from smdistributed.modelparallel import __version__ as __version__
from smdistributed.modelparallel.torch import exceptions, patches, state_mod, utils
from smdistributed.modelparallel.torch._files import load as load  # type: ignore[assignment]
from smdistributed.modelparallel.torch._files import resume_from_checkpoint as resume_from_checkpoint  # type: ignore[assignment]
from smdistributed.modelparallel.torch._files import save as save  # type: ignore[assignment]
from smdistributed.modelparallel.torch._optimizer import DistributedOptimizer as DistributedOptimizer
from smdistributed.modelparallel.torch._start import init as init
from smdistributed.modelparallel.torch._steps import step as step  # type: ignore[no-redef]

__all__ = [*_names, "exceptions", "patches", "state_mod", "utils"]

for _name in ("amp", "model", "nn", "optimizers"):  # which take the places of the modules of `shardwright`
    import_module(f"{__name__}.{_name}")
