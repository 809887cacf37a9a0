"""A bench: attacks by a share of a federation's clients against rules of aggregation, all simulated."""
