"""Pictures of runs and comparisons."""

from .pictures import draw_comparison, draw_run

__all__ = ["draw_comparison", "draw_run"]
