"""What messages between two ranks cost, beside a copy, Gloo, Open MPI and UCX's own test, all in one run."""
