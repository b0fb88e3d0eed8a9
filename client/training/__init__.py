"""Helpers around a training loop; synchronising a model needs none of them.

Code that runs inside a layer belongs in `client.nn`.
"""
