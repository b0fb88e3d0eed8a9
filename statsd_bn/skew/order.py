"""Order: the layers of a model in the order of a step, learnt from looks at some of them."""

from collections.abc import Mapping, Sequence


def in_order(known: Mapping[str, object], names: Sequence[str], most: int) -> list[str]:
    """Names of all layers; new ones come before the one that comes next in this look.

    Args:
        known: by the names that are known, in their order.
        names: those of a look, in the order of its rounds.
        most: how many there are at most; what is more is left out.
    """
    order = list(known)
    if all(name in known for name in names):
        return order
    next_one = len(order)
    for name in reversed(names):
        if name in order:
            next_one = order.index(name)
        elif len(order) < most:
            order.insert(next_one, name)
    return order
