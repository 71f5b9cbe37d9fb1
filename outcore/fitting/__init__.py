"""The life of a kind of step, from its first recording to a plan that is settled."""
