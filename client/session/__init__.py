"""A rank's connection to the server: sockets, threads and a clock around `client.session.protocol`.

It sends arrays and bytes, and loads no torch. Finding or starting a server belongs in `client.launch`.
"""
