"""The commands `status` and `check`, and the format of the server's log.

The server's flags are in `server.config`, and `keygen` is in `server.security`.
"""
