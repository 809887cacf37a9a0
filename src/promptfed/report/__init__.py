"""Charts and pictures of runs and comparisons, and the one HTML page."""

from .claims import draw_claims
from .pictures import draw_comparison, draw_partition, draw_run

__all__ = ["draw_claims", "draw_comparison", "draw_partition", "draw_run"]
