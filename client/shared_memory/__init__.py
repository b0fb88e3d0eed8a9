"""Memory that the processes of one host share: who may map it, what lies where, and how a process waits for others.

What the rows mean, and what becomes of a wait that takes long, is not known here. It loads no torch.
"""
