"""A rank's conversation with the server: the protocol, its retries, its sockets.

It works on arrays and bytes and loads no torch. How a server is found or started belongs in `client.launch`.
"""
