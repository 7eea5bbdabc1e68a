"""Waits that are long: what every rank does then, and the proof that ranks wait for one another."""
