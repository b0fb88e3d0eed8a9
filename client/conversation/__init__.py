"""What a rank says to the server and makes of the answers: the client half of the protocol, pure.

Frames and times go in, frames and results come out. Here belongs what a member is, what it keeps of its rounds, and how
it registers, waits and asks again. Whatever needs a socket, a thread or a clock belongs in `client.connection`, which
runs this.
"""
