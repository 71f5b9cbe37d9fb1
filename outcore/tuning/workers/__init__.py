"""Workers of unequal speed -> a global batch, each one's part of it, and gradients weighted by it."""
