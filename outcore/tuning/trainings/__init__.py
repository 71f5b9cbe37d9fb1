"""Settings -> short trainings that are compared: which is soonest at a target, which is best in the end."""
