"""The old import path: the table of its interface, and scripts that are written for it."""
