"""Transports: how the rows of a layer reach the other ranks, and how the total comes back.

`transport` has the contract, `choose` selects the transport of a layer, and each transport has a file of its own.
Transports add rows; the meaning of a row belongs in `client.ops`.
"""
