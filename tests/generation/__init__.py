"""Generation with key/value caches over the ranks of a pipeline, beside one plain process."""
