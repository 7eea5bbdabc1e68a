"""Data parallelism: ranks of one stage average their gradients (the paper, 3.2.2)."""
