"""Operators: who computes a layer's steps on its device."""
