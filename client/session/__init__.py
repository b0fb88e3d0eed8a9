"""A rank's connection to the server: sockets, threads and a clock around `client.session.protocol`; without torch."""
