"""Estimates what a training step needs, on this machine or another one, before anything is run."""
