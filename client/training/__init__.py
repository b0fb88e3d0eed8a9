"""Helpers around a training loop: none is needed to synchronise a model.

What runs inside of a layer belongs in `client.layers`.
"""
