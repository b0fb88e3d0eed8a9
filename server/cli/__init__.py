"""The commands `status`, `check` and `report`, and requests to a running server.

The server's flags are in `server.config`, and `keygen` is in `server.security`.
"""
