"""A rank of a job: its position, connections and steps, and the objects that it exchanges with other ranks."""
