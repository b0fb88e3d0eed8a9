"""The view: a program that asks a server once a second and serves its jobs as a page and to Prometheus.

It is a process of its own, and only reads. What the server tells belongs in `server.core.report`.
"""
