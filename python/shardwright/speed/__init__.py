"""What dividing a model gains: one line of rank 0, after the first measured steps."""

from shardwright.speed.announcement import SpeedAnnouncement

__all__ = ["SpeedAnnouncement"]
