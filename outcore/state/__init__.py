"""Weights, gradients and optimizer state with a home beside the device."""
