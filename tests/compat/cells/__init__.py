"""Every key and argument of the old interface at each value and degree: works, taken and said, or refused."""

from tests.compat.cells.cell import LAYOUTS, Cell, Layout
from tests.compat.cells.table import CELLS

__all__ = ["CELLS", "LAYOUTS", "Cell", "Layout"]
