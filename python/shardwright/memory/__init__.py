"""The account of memory: what fills each rank, predicted and measured, and what would need less."""

from shardwright.memory.account import MemoryAccount
from shardwright.memory.exhausted import OutOfMemory
from shardwright.memory.heap import give_back_large
from shardwright.memory.report import Announcement, memory_report

__all__ = ["Announcement", "MemoryAccount", "OutOfMemory", "give_back_large", "memory_report"]
