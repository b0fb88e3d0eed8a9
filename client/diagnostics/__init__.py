"""Diagnostics of this process for other ranks: the stack, torch's collectives, the end of a broken job.

Ranks that wait in a round ask for the stack of the rank that is missing. A background thread samples it; it loads no
torch, and reads torch's state only where the script has loaded torch. Requests and replies travel in `client.session`.
"""
