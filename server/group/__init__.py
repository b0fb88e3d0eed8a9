"""One group of one job: its members, its rounds, its recovery after a restart of the server, and its findings.

Pure: no socket, thread or clock. What concerns several groups belongs in `server.core`.
"""
