"""Execution of modules on request: what runs on this rank for others, and what it asks of them."""
