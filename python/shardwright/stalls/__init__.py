"""Reports of long waits, and the detection of deadlocks between ranks."""
