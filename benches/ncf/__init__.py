"""Neural collaborative filtering with divided tables, over different batches and over the same one."""
