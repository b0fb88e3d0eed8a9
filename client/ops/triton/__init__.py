"""Triton kernels for a layer's call on CUDA whose rows stay on the device: one slice, without a mask."""
