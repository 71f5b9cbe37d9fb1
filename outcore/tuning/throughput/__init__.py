"""A model and a memory budget -> the curve of samples per second, seconds and bytes over the micro-batch."""
