"""Published weights: where they are, what they look like, and how they are read."""
