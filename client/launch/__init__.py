"""`client.connect`: its settings from arguments, variables and launchers, and its server, found or started.

The messages on the connection belong in `client.session`.
"""
