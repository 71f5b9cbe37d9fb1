"""Decisions -> the program that simulator and runtime both follow."""
