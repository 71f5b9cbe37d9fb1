"""A model of the CUDA caching allocator, and the search for a plan whose blocks find places in it."""
