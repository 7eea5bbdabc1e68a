"""Generation over two ranks beside one process."""
