"""How a process finds its place and its server: arguments, variables, launchers, torch's store, a server of its own.

What is said over the connection then belongs into `client.connection`.
"""
