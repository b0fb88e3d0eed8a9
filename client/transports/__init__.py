"""Transports: carry the rows of a layer to the other ranks and return their sum.

`transport` defines the contract, `choose` selects the transport of a layer, and each transport has a module. Transports
add rows; the meaning of a row belongs in `client.ops`.
"""
