"""What people call and read: `status` and `check`, and the lines that the server logs.

The server's flags are in `server.config`; what `keygen` makes is in `server.security`.
"""
