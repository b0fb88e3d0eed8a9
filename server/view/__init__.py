"""The view: a process that asks a server once a second, and serves its jobs as a page and to Prometheus.

It only reads. The content of the report belongs in `server.core.report`.
"""
