"""The user's step -> Trace; this machine -> Machine."""
