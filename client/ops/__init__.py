"""Batch normalisation of tensors: the backends that compute, and the autograd function that synchronises them.

`engine` chooses the backend of a slice: reference, native (C) or fused (CUDA); `triton` computes plain calls on CUDA.
`functional` runs one call of a layer over `client.transports`. Modules and buffers belong in `client.nn`.
"""
