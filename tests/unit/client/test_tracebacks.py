"""Errors reach the user's code without internal frames, and with a note that names the page about them."""

import pickle
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import client
import statsd_bn
from client.session import connection
from client.session.channel_pool import ZmqChannelPool
from client.tracebacks import api_boundary, hide_internal_frames
from statsd_bn.errors import ConfigurationError, RoundMismatch
from support.foreign_code import run_as
from support.memory_members import MemoryMaster

OUR_FOLDERS = tuple(f"{Path(package.__file__).parent}/" for package in (client, statsd_bn))


def ours(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(OUR_FOLDERS)]


def failing_round(monkeypatch, *, after: int = 0) -> nn.Module:
    real, rounds = connection.Connection._begin_round, []

    def round_(self, *arguments, **options):
        # The gathers in which the members agree on a transport do not count.
        rounds.append(options.get("is_counted", True))
        if sum(rounds) > after:
            raise RoundMismatch("the ranks differ")
        return real(self, *arguments, **options)

    monkeypatch.setattr(connection.Connection, "_begin_round", round_)
    return client.SynchronizedBatchNorm1d(3)


@pytest.fixture
def connected(monkeypatch):
    with MemoryMaster().connect(0, 1) as open_connection:
        monkeypatch.setattr(connection.Connection, "is_alone", lambda *_: False)
        monkeypatch.setattr(connection, "_current", open_connection)
        yield open_connection


@pytest.mark.usefixtures("connected")
def test_forward_shows_one_frame_of_ours(monkeypatch):
    layer = failing_round(monkeypatch)
    with pytest.raises(RoundMismatch) as caught:
        layer(torch.randn(4, 3))
    assert ours(caught.value) == ["forward"]
    assert caught.value.__notes__ == ["see docs/errors.md#roundmismatch"]
    assert caught.value.__context__ is None


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize("order", [1, 2])
def test_backward_shows_one_frame_of_ours(monkeypatch, order):
    layer = failing_round(monkeypatch, after=order)
    x = torch.randn(4, 3, requires_grad=True)
    loss = (layer(x) ** 2).sum()
    if order == 2:
        loss = torch.autograd.grad(loss, x, create_graph=True)[0].sum()
    with pytest.raises(RoundMismatch) as caught:
        loss.backward()
    assert ours(caught.value) == ["backward"]


@pytest.mark.usefixtures("connected")
def test_replicas_show_one_frame_of_ours_and_the_users_model(monkeypatch):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = failing_round(monkeypatch)

        def forward(self, x):
            return self.bn(x)

    model = client.DataParallelWithCallback(Net(), device_ids=["cpu", "cpu"])
    with pytest.raises(RoundMismatch) as caught:
        model(torch.randn(4, 3))
    assert len(ours(caught.value)) == 1
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert any(frame.filename == __file__ and frame.name == "forward" for frame in frames)


@pytest.mark.usefixtures("connected")
def test_a_compiled_layer_shows_one_frame_of_ours(monkeypatch):
    layer = failing_round(monkeypatch)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with pytest.raises(RoundMismatch) as caught:
        compiled(torch.randn(4, 3))
    assert len([name for name in ours(caught.value) if name != "forward"]) == 1


def test_the_error_for_a_bad_endpoint_has_no_context():
    with pytest.raises(ConfigurationError) as caught:
        client.connect("nonsense", rank=0, world_size=1)
    assert len(ours(caught.value)) == 1
    text = "".join(traceback.format_exception(caught.value))
    assert "deque" not in text
    with pytest.raises(ConfigurationError) as caught:
        ZmqChannelPool("nonsense")
    assert not isinstance(caught.value.__context__, IndexError)


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize("value", ["full", "Full"])
def test_all_frames_are_shown_on_demand(monkeypatch, value):
    monkeypatch.setenv("STATSD_BN_TRACEBACK", value)
    layer = failing_round(monkeypatch)
    with pytest.raises(RoundMismatch) as caught:
        layer(torch.randn(4, 3))
    assert {"normalise", "run_slave", "round"} <= set(ours(caught.value))


@pytest.mark.parametrize("value", ["", "full"])
def test_a_cause_without_further_information_is_not_shown(monkeypatch, value):
    monkeypatch.setenv("STATSD_BN_TRACEBACK", value)
    monkeypatch.setenv("STATSD_BN_INSECURE", "1")
    with pytest.raises(ConfigurationError, match="Invalid argument") as caught:
        client.connect("tcp://127.0.0.1:*", rank=0, world_size=2)
    assert ("ZMQError" in "".join(traceback.format_exception(caught.value))) is (value == "full")


OURS = """
def wrong(fail):
    try:
        fail()
    except (RuntimeError, ValueError) as error:
        raise RoundMismatch("the ranks differ") from error
"""
COMMON = run_as("def fail(): int('x')", "/home/user/sched.py", "sched")["fail"]  # `sched` is also a standard module


@pytest.mark.parametrize(
    "fail",
    [lambda: int("x"), COMMON, lambda: nn.Linear(2, 2)(torch.ones(3))],
    ids=["user's", "user's of a common name", "model's"],
)
def test_a_cause_that_a_users_code_or_a_model_has_raised_stays(fail):
    wrong = run_as(OURS, "client/ours.py", "client.ours", RoundMismatch=RoundMismatch)["wrong"]
    with pytest.raises(RoundMismatch) as caught:
        api_boundary(wrong)(fail)
    assert type(caught.value.__cause__) in {RuntimeError, ValueError}


def test_foreign_exceptions_pass_unchanged():
    @api_boundary
    def wrong():
        return torch.zeros(2)[5]

    with pytest.raises(IndexError) as caught:
        wrong()
    assert not getattr(caught.value, "__notes__", [])


def test_the_note_is_added_once_and_survives_a_pickle():
    error = RoundMismatch("the ranks differ", step=3)
    hide_internal_frames(error)
    hide_internal_frames(error)
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - of our own
    assert copy.__notes__ == error.__notes__ == ["see docs/errors.md#roundmismatch"]
    assert (str(copy), copy.fields) == ("the ranks differ", {"step": 3})


def test_frames_of_concurrent_futures_are_hidden():
    @api_boundary
    def in_another_thread():
        def fail():
            raise RoundMismatch("the ranks differ")

        with ThreadPoolExecutor(1) as threads:
            threads.submit(fail).result()

    with pytest.raises(RoundMismatch) as caught:
        in_another_thread()
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert not any("concurrent/futures" in file for file in files)


# Public functions without `api_boundary`, and why.
NOT_DECORATED = {
    # They raise no error of ours.
    *("Connection.close", "Connection.explain", "Connection.metrics", "DDPHandler.set_epoch", "SlavePipe.key"),
    *("SlavePipe.places", "ElasticState.restore", "commit_running_statistics", "conversion_report"),
    *("current_connection", "disconnect", "set_sbn_eps_mode"),
    # Replicas meet later, in `parallel_apply`.
    "patch_replication_callback",
    # They raise TypeError.
    *("register_conversion", "synchronized_class"),
    # They call `hide_internal_frames` themselves: in each round, and in a context manager.
    *("Connection.round", "SlavePipe.run_slave", "join"),
    # A context manager around the user's own code.
    "patch_sync_batchnorm",
    # The transports call these inside decorated functions.
    *(
        "Connection.raise_if_broken",
        "Connection.gather_in_group",
        "Connection.over_server",
        "Connection.run",
        "Connection.round_trip",
        "Connection.session",
    ),
    # These checks have no inner frames.
    *("Connection.group", "Connection.is_alone"),
}
# Torch calls the methods of these classes, or they raise no error of ours.
OF_TORCH = {"CallbackContext", "ElasticSampler"}


def public_functions():
    for name in client.__all__:
        public = getattr(client, name)
        if not isinstance(public, type):
            yield name, public
        elif not issubclass(public, nn.Module) and name not in OF_TORCH:
            for part, given in vars(public).items():
                function = getattr(given, "__func__", given)
                if not part.startswith("_") and callable(function):
                    yield f"{name}.{part}", function


def test_every_public_function_hides_frames_or_is_listed():
    found = dict(public_functions())
    marked = {name for name, function in found.items() if function.__code__.co_name == "with_hidden_frames"}
    assert {"connect", "DDPHandler.mp_sync", "ElasticState.commit", "recalibrate"} <= set(found)
    assert set(found) - marked == NOT_DECORATED


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize(
    "call",
    [
        lambda _: client.DDPHandler(None).mp_sync([1, 2]),
        lambda _: client.DDPHandler(None).mp_sync_dict({"loss": 1.0}),
        lambda model: client.recalibrate(model, [torch.randn(4, 3)]),
        lambda _: client.average_gradients([nn.Parameter(torch.ones(2))]),
        lambda _: client.moments(torch.ones(2)),
        lambda _: client.RunningMoments(2).update(torch.ones(1, 2)),
        lambda model: client.ElasticState(model).commit(),
        lambda model: client.run_elastic(lambda _: None, client.ElasticState(model)),
    ],
    ids=["mp_sync", "mp_sync_dict", "recalibrate", "average_gradients", "moments", "update", "commit", "run_elastic"],
)
def test_public_functions_show_one_frame_of_ours(monkeypatch, call):
    layer = failing_round(monkeypatch)
    monkeypatch.setattr(connection.Connection, "rejoin", lambda *_: None)
    with pytest.raises((RoundMismatch, ConfigurationError)) as caught:
        call(layer)
    assert len(ours(caught.value)) == 1


@pytest.mark.usefixtures("connected")
def test_join_shows_one_frame_of_ours(monkeypatch):
    layer = failing_round(monkeypatch)

    def fail(*_):
        raise RoundMismatch("the ranks differ")

    monkeypatch.setattr(connection.Sessions, "change_participation", fail)
    with pytest.raises(RoundMismatch) as caught, client.join(layer):
        pass
    assert ours(caught.value) == ["join"]
