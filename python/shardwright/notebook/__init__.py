"""``shardwright.notebook.launch``: a function of a notebook, run by the ranks of a job."""

from shardwright.notebook.launch import launch

__all__ = ["launch"]
