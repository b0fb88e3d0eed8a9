"""How a process finds its rank and its server: arguments, variables, launchers, torch's store, a server of its own.

What is said over the connection then belongs in `client.connection`.
"""
