"""The commands `status`, `check` and `report`, and requests to a running server."""
