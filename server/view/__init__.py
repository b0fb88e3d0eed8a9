"""The view: a program that asks a server once a second and shows its jobs in a terminal, on a page or to Prometheus.

It is a process of its own, and only reads. What the server tells belongs in `server.core.report`.
"""
