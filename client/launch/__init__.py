"""How `client.connect` finds its settings and its server: arguments, variables, launchers, torch's store.

It also starts a server where the job needs one. What is sent over the connection belongs in `client.session`.
"""
