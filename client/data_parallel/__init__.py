"""Replicas of a model in one process: threads that share a batch. They meet at a barrier in each layer.

Replicas in separate processes need nothing from here.
"""
