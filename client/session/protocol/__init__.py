"""The client half of the protocol, pure: frames and times go in, frames and results come out.

It registers a member, stores the state of its rounds, and decides when to wait, to retry and to give up. Sockets,
threads and the clock belong in `client.session`.
"""
