"""One call of a layer: its rounds forward and backward, and the gradients that torch asks for.

It computes with `client.ops` and exchanges over `client.transports`; modules and buffers belong in `client.layers`.
"""
