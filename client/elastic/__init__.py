"""Elastic training: committing and restoring the state, and splitting the data, when members join or are lost.

The connection survives a change of members; this package restores the training after it.
"""
