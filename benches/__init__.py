"""Measurements of the library."""
