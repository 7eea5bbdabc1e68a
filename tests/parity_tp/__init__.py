"""Parity under tensor parallelism, gradient by gradient; run by ``python -m tests.parity_tp``."""
