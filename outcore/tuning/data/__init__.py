"""The user's data, model and optimizer -> batches of any size, and everything put back after a trial."""
