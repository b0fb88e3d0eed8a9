"""What can be told of a group from the rounds it has had: who is slow, and what there is to look at for skew.

Here belongs what looks at finished rounds and at what the members say, and makes findings of it. What decides how a
round ends does not; whose data differ is said by `statsd_bn.skew`. Everything is pure: times go in.
"""
