"""Helpers around a training loop, which a synchronised model does not need.

Code that runs inside a layer belongs in `client.nn`.
"""
