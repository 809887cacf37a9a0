"""Clients on other machines, over Flower."""
