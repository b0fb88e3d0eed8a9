"""The modules that users put into a model, and the conversion of whole models.

Helpers around a training loop belong in `client.training`.
"""
