"""Replicas of a model in one process: threads that share a batch, and meet in each layer.

Replicas in processes of their own need nothing from here.
"""
