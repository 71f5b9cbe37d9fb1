"""Batches of any size from the user's data, and restoring everything after a trial."""
