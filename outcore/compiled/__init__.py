"""The compiled front end: graphs of torch.compile run inside a step as individual launches."""
