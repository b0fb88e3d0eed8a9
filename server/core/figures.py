"""Figures: tells whoever asks what the server has seen of the members' data, in answers of a bounded size."""

import numpy as np

from server.core.allowance import SENT_EACH_SECOND, Allowance
from server.group.master import SyncMaster
from server.limits.access import Tenant
from server.limits.quota import Budget
from statsd_bn import limits
from statsd_bn.messages import Figures, FiguresRequest
from statsd_bn.skew import FIGURES
from statsd_bn.wire import encode


class FiguresAnswers:
    """Frames that carry figures.

    Args:
        budget: where refusals are counted.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._allowance = Allowance()

    def frame(self, now: float, tenant: Tenant, request: FiguresRequest, master: SyncMaster | None) -> bytes:
        """Answer for a tenant.

        Args:
            now: the time.
            tenant: who asks.
            request: what it asks for.
            master: of the group; None if the tenant may see no such group.

        Raises:
            LimitExceeded: it has asked for too much lately.
        """
        owner = tenant.owner("")
        if self._allowance.is_spent(now, owner):
            text = f"figures: expected to be asked for at most {SENT_EACH_SECOND} bytes a second"
            raise self._budget.exceeded(text, SENT_EACH_SECOND, "bytes of figures a second")
        frame = encode(_answer(request, master))
        self._allowance.spend(now, owner, len(frame))
        return frame


def _answer(request: FiguresRequest, master: SyncMaster | None) -> Figures:
    if master is None:
        return Figures(request.job, request.group, request.first, 0, "", np.zeros((0, 0, FIGURES)))
    total, names, values = master.insight.comparison.averages(request.first, limits.MAX_FIGURES_BYTES)
    return Figures(request.job, request.group, request.first, total, "\n".join(names), values)
