"""The compiled front end: graphs that torch.compile made run inside a step as the launches they consist of."""
