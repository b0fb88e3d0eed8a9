"""Keys: where the server's own and its clients' come from, and how they are made.

Who may do what with a key belongs in `server.limits`.
"""
