"""Lanes: the ways on which a layer's rows reach the others, and their sum comes back.

One contract, and a file for each way. What rows mean is not known here.
"""
