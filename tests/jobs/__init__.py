"""Jobs of tests: ranks that are forked from a process which has torch loaded, their ports, and how they are watched."""
