"""The rounds of a group: who has brought what, what it adds up to, and what is kept to answer again.

Who belongs to the group is asked of `server.membership`. Pure: no socket, thread or clock.
"""
