"""``smp.verify``: checks, on the user's own model and batch, that a distributed step equals one in one process."""

from shardwright.verify.report import Departure, Report, Row
from shardwright.verify.run import verify

__all__ = ["Departure", "Report", "Row", "verify"]
