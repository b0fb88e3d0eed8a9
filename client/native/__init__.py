"""The native core in C: arithmetic on a CPU and rounds in shared memory. Python calls it through ctypes with addresses.

It needs no headers of Python or torch, so one build serves all their versions. Nothing here imports torch.
"""
