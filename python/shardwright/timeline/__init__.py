"""Pictures of what every rank did when: a trace for Perfetto and a page for any browser.

Both are written from the records that the execution servers keep; the same form serves measured and simulated steps.
"""

from shardwright.timeline.chrome import write_chrome_trace
from shardwright.timeline.page import write_html
from shardwright.timeline.records import RankSummary, Record, summarise

__all__ = ["RankSummary", "Record", "summarise", "write_chrome_trace", "write_html"]
