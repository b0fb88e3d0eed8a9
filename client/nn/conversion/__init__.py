"""Conversion of whole models: which layers become ours, which cannot and why, and the way back.

What becomes of a class with a `forward` of its own belongs in `client.nn.adopted`.
"""
