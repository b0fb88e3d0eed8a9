"""Triton kernels for a layer on CUDA whose rows stay there: one slice, without a mask.

What the kernels find wrong is a number for each row, the sum of these:
"""

OTHER_ROUND = 1
"""It is of another round."""

NOT_FINITE = 2
"""It holds NaN or infinity."""

FEW = 4
"""The whole batch has too few values per channel; behind the rows."""
