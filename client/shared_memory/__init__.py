"""Memory that the processes of one host share: who may map it, and how they add rows in it.

What the rows mean, and what becomes of a wait that takes long, is not known here. It loads no torch.
"""
