"""There is no TensorFlow interface: importing it says so."""

raise ImportError(
    "smdistributed.modelparallel.tensorflow: Shardwright is for PyTorch, and has no TensorFlow interface; "
    "smdistributed.modelparallel.torch is there"
)
