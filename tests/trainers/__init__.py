"""Trainers of other libraries over ranks, beside their plain use in one process."""
