"""Training that goes on when members come and go: states to commit and restore, and shares of the data.

The connection alone survives a change of members; this package restores the training after it.
"""
