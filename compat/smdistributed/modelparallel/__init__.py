"""The import path of SageMaker's model parallelism library, on Shardwright.

``import smdistributed.modelparallel.torch as smp`` is the interface; see the guide's page "Coming from the original
library" for every symbol and configuration key.
"""

from pathlib import Path

from smdistributed.modelparallel._alone import check_alone

__all__ = ["__version__"]

#: The version of the interface, which scripts compare; this distribution has Shardwright's version.
__version__ = "1.15.0"

check_alone(Path(__file__).parent)
