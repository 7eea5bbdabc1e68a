"""Jobs that lose a rank and go on without it."""
