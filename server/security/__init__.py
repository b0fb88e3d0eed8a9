"""Keys, tenants and quotas: which keys the server accepts, for which jobs, and how much each tenant may use.

`access` and `quota` are pure. `keygen` reads and writes the files of keys.
"""
