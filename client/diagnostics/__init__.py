"""Diagnostics of this process for other ranks: the stack, torch's collectives, the end of a broken job.

Ranks that wait in a round ask for the stack of the missing rank. A background thread samples it. The thread never
imports torch and reads torch's state only if the script has imported it. `client.session` sends requests and reports.
"""
