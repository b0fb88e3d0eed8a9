"""The view: a program that asks a server once a second and serves its jobs as a page and to Prometheus.

It is a separate process, and only reads. The content of the report belongs in `server.core.report`.
"""
