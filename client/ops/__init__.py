"""Arithmetic on one device: sums, normalisation and their gradients, by `engine` and its backends.

Nothing here knows of layers, members or servers. A faster way to compute the same belongs here.
"""
