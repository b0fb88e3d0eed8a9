"""Transports: exchange the rows of a layer for their sum over all ranks; the meaning of a row is in `client.ops`."""
