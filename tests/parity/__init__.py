"""Parity: models split over ranks against one process, gradient by gradient; run by ``python -m tests.parity``."""
