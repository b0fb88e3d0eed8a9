"""What can be told of a group from the rounds it has had: who is slow, and whose data differ.

Here belongs what looks at finished rounds and at what the members say, and makes findings of it. What decides how a
round ends does not. Everything is pure: times go in.
"""
