"""Where clients run."""

from .base import Clients

__all__ = ["Clients"]
