"""`client.connect`: settings from arguments, variables and launchers, and the server, found or started.

The messages on the connection belong in `client.session`.
"""
