"""What scripts use to test themselves; see :mod:`smdistributed.modelparallel.test.torch.utils`."""
