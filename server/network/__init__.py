"""The server's sockets: authentication, the receive loop, and connections.

The meaning of frames belongs in `server.core`.
"""
