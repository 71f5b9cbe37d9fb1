"""Timelines -> text, pictures, traces. No torch inside."""
