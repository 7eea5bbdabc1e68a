"""Loss curves of one training run over several degrees of parallelism lie on one another."""
