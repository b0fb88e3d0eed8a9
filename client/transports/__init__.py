"""Transports: how a layer's rows reach the other members, and how their sum comes back.

`transport` has the contract, `choose` picks the one of a layer, and each kind has a file of its own. What the rows
mean is not known here.
"""
