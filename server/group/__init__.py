"""One group of one job: its members and its rounds brought together, and what is noticed of them.

Who belongs to it belongs in `server.membership`, what becomes of a round in `server.rounds`, and what concerns several
groups in `server.core`. Pure: no socket, thread or clock.
"""
