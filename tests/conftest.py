"""What every test may rely on."""

import signal

# Shells start background jobs with SIGINT ignored, which children inherit; tests need it as a terminal leaves it.
signal.signal(signal.SIGINT, signal.default_int_handler)
