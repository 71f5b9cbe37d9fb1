"""Recorded steps of a few sizes -> the step of any other size."""
