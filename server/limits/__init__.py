"""What the server agrees to do and to keep, and for whom: quotas, bytes, tenants.

Pure: no socket, thread or clock.
"""
