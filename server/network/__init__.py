"""The server's sockets: authentication, the receive loop, and connections."""
