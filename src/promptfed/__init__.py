"""Prompt-based federated learning over vision and vision-language models."""
