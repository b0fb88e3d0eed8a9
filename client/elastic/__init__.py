"""Training that goes on when members come and go: states to commit and restore, and shares of the data.

The connection alone already survives a change of members; what is here restores the training.
"""
