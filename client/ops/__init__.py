"""Operators: kernels of ours for one kind of device, in its language, and how they are launched.

What torch's operators can compute belongs in `client.kernels`; what the numbers mean to a layer is not known here.
"""
