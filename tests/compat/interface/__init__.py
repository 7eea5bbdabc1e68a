"""The public interface of the original library, as a table: what of it is here, where, and what differs.

The facts are those of its public documentation and of the paper. The guide's page is written from the table
(``python -m tests.compat.page``).
"""

from tests.compat.interface.keys import KEYS
from tests.compat.interface.old import OLD_VERSIONS
from tests.compat.interface.rows import Key, Symbol
from tests.compat.interface.symbols import SYMBOLS

__all__ = ["KEYS", "OLD_VERSIONS", "SYMBOLS", "Key", "Symbol"]
