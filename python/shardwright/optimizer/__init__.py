"""Optimizers over the parameters that a rank owns, and gradient clipping over all of them."""
