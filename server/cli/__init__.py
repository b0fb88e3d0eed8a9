"""The commands `status`, `check` and `report`.

The server's flags are in `server.config`, and `keygen` is in `server.security`.
"""
