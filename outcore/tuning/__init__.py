"""Batch size and learning rate under a memory plan."""
