"""The exceptions of ``smdistributed.modelparallel.backend.exceptions``, where scripts look for them."""

from smdistributed.modelparallel.backend.exceptions import *  # noqa: F403
from smdistributed.modelparallel.backend.exceptions import __all__ as __all__
