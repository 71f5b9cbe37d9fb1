"""Bytes on a tier: the device, pinned host memory and the disk."""
