"""What a run is on disk: its configuration, its folder, comparisons of several, and their tables."""
