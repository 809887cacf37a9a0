"""Searches on validation data: settings for the rows of a comparison (tune), and a method (choose)."""
