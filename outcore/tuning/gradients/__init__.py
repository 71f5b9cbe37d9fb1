"""Gradients -> their noise, what a batch is worth, and the learning rates at which the loss falls."""
