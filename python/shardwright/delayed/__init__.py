"""Delayed parameter initialization: operations are recorded, and run where the parameters are owned."""
