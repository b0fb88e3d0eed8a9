"""One call of a layer: its rounds forward and backward, and the gradients that torch asks for.

It computes with `client.kernels` and exchanges over `client.transports`; modules and buffers belong in `client.layers`.
"""
