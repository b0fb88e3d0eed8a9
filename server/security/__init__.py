"""Keys, tenants and quotas: which keys the server accepts, for which jobs, and how much each tenant may use."""
