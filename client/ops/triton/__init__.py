"""Triton kernels for a call on CUDA with rows that stay on the device: one slice, without a mask.

Only `exchange` loads without Triton; nothing else is imported before `exchange.works_on` has found it.
"""
