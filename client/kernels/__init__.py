"""Arithmetic on one device: sums, normalisation and their gradients, for CPU, CUDA and any other device.

Nothing here knows of layers, members or servers. A faster way to compute the same belongs here.
"""
