"""Random training programs against plain PyTorch: `python -m tests.fuzz --help`."""
