"""What scripts use to test themselves."""
