"""Batch normalisation of tensors: the backends that compute, and the autograd function that synchronises them."""
