"""Gradient noise, the worth of a batch, and the learning rates at which the loss falls."""
