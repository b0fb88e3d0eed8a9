"""The native core in C, as a library that `build` compiles and `library` loads: arithmetic on a CPU, rounds in memory.

The library needs neither Python's headers nor torch's, so one serves every version of both. It is called by ctypes with
addresses. What the numbers mean to a layer is not known here, and nothing here imports torch.
"""
