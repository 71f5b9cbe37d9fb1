"""Trace index + Machine + Budget -> decisions: one module per planner, and what only planners share."""
