"""The native core in C: arithmetic on a CPU and rounds in shared memory. `build` compiles it, `library` loads it.

The library needs no headers of Python or torch, so one build serves all their versions. Its functions are called
through ctypes and take addresses. Nothing here imports torch; the layers' use of the results belongs in `client.ops`.
"""
