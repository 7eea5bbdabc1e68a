"""Generation by a divided model: its sequences run in microbatches, and draw the numbers that one process would."""

from shardwright.generation.draws import multinomial
from shardwright.generation.generate import generate

__all__ = ["generate", "multinomial"]
