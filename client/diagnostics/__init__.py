"""Diagnostics of this process for other ranks: the stack, torch's collectives, the end of a broken job.

The server asks for the stack of a rank that others wait for. A background thread samples it. The thread never imports
torch, and reads torch's state only if the script has imported torch. `client.session` receives requests and reports.
"""
