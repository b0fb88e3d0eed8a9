"""Tensors and nested states to bytes and back, without pickle.

What bytes are sent for is not known here.
"""
