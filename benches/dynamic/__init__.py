"""Models whose calls depend on their data, in dynamic mode beside static mode."""
