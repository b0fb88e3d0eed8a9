"""Triton kernels for a call on CUDA with rows that stay on the device: one slice, without a mask.

Only `kernels` needs Triton, and is imported by the first launch.
"""
