"""Namesakes: other modules that are called `client` or `server`, as the packages that users import and start.

The command `statsd-bn` and the warning about a foreign `client` belong here, since this package has a name of its own.
What the command does belongs in `server.cli`.
"""
