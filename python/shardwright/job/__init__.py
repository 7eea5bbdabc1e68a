"""A rank of a job: its place, its connection, its steps, and what it says to other ranks."""
