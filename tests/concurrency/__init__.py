"""Checks of threads: laws under chosen orders, memory under AddressSanitizer, and faults that they must catch."""
