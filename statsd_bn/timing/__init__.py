"""Timing: how long things took, counted in buckets. Pure: seconds go in.

What is timed, and what is said about it, belongs with whoever times it.
"""
