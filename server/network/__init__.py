"""The server's sockets: who is let in, what comes, who has gone.

What a frame means belongs in `server.core`.
"""
