"""Operators that stand for a layer where torch.compile traces it, beside `client.layers.custom_op`.

What torch.compile does not see, the call outside of it, belongs in `client.layers`.
"""
