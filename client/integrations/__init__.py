"""Other frameworks' hooks, each in a module of its own that is imported only where that framework is used.

What works without a framework belongs in `client.training`.
"""
