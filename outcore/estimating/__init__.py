"""A model and a step -> what it will need, on this machine or another one, before anything is run."""
