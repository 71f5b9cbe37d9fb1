"""The life of a kind of step, from its recording to the plan on which it settles."""
