"""Remote execution of modules: the requests that this rank executes for other ranks, and those that it sends."""
