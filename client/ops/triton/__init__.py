"""Triton kernels for a call on CUDA with rows that stay on the device: one slice, without a mask.

`exchange` is the entry point and loads without Triton. `launch` and `kernels` need Triton; nothing else imports them
before `exchange.works_on` has found it.
"""
