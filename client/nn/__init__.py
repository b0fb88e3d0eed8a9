"""Modules for users' models, and the conversion of whole models.

Helpers around a training loop belong in `client.training`.
"""
