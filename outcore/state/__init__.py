"""Weights, gradients and optimizer state with a home outside the device."""
