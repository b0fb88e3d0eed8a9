"""What the server agrees to do and to keep, and for whom: quotas, accounts, tenants, shares of its time.

Pure: no socket, thread or clock.
"""
