"""Mutation testing: faults planted one at a time, each of which ``make test`` must catch."""
