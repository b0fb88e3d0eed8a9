"""The command `statsd-bn`, under a name that no other module called `server` can take.

What the command does belongs in `server.cli`.
"""
