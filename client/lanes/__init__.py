"""Lanes: how a layer's rows reach the other members, and how their sum comes back.

`lane` has the contract, `choose` picks the lane of a layer, and each kind of lane has a file of its own. What the rows
mean is not known here.
"""
