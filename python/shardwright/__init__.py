"""Model parallelism for PyTorch."""
