"""Every ordered pair of layouts: saved under one, loaded under the other, and trained on as if nothing had been."""
