"""A recorded step -> the step to plan for."""
