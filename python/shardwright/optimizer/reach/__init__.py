"""How far an optimizer looks when it updates an element, asked of each that trains what is divided over ranks."""

from shardwright.optimizer.reach.draws import drawing_nothing
from shardwright.optimizer.reach.question import Verdict, ask, ask_unwrapped, may_divide
from shardwright.optimizer.reach.whole import WholeTensors

__all__ = ["Verdict", "WholeTensors", "ask", "ask_unwrapped", "drawing_nothing", "may_divide"]
