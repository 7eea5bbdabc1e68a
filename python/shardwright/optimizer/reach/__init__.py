"""How far an optimizer looks when it updates an element, asked of each that trains what is divided over ranks."""

from shardwright.optimizer.reach.question import ask, ask_unwrapped
from shardwright.optimizer.reach.whole import WholeTensors

__all__ = ["WholeTensors", "ask", "ask_unwrapped"]
