"""Keys, tenants and quotas. Decides which keys are accepted, for which jobs, and how much each tenant may use.

`access` and `quota` are pure. `keygen` reads and writes the files of keys.
"""
