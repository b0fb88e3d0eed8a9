"""A rank's connection to the server: its sockets, its threads, its clock.

It runs what `client.conversation` decides. It works on arrays and bytes and loads no torch. How a server is found or
started belongs in `client.launch`.
"""
