"""Many messages among four processes, and processes killed in the middle of them: ``make stress``."""
