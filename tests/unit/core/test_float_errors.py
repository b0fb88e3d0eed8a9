import threading

import numpy as np
import pytest

from statsd_bn.reduction import ignore_float_errors

INFINITY = np.array([np.inf])


@ignore_float_errors
def difference() -> float:
    return float((INFINITY - INFINITY)[0])


def test_numpy_does_not_warn_of_a_new_nan():
    assert np.isnan(difference())
    with pytest.warns(RuntimeWarning, match="invalid value"):
        difference.__wrapped__()


def test_nested_calls_set_numpys_state_once(monkeypatch):
    calls = []
    errstate = np.errstate
    monkeypatch.setattr(np, "errstate", lambda **given: calls.append(given) or errstate(**given))
    assert np.isnan(ignore_float_errors(lambda: difference() + difference())())
    assert calls == [{"all": "ignore"}]


def test_numpy_warns_again_after_an_error():
    @ignore_float_errors
    def fail():
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - raised above
        fail()
    with pytest.warns(RuntimeWarning, match="invalid value"):
        difference.__wrapped__()
    assert np.isnan(difference())


def test_each_thread_has_its_own_state():
    found = []
    thread = threading.Thread(target=lambda: found.append(difference()))

    @ignore_float_errors
    def beside():
        thread.start()
        thread.join()

    beside()
    assert np.isnan(found)
