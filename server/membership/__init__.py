"""Who belongs to a group: its life, who may join, who has left or is lost, who is to come back to a restarted server.

What members bring to a round does not belong here. Pure: no socket, thread or clock.
"""
