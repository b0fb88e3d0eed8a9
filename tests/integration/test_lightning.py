"""A real Lightning `Trainer` in two processes trains like one process on the whole batch; unit tests of the plugin."""

import csv
import itertools
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import client
from client import integrations
from client.session.sessions import Sessions
from programs import lightning_training as training
from support.launched import made_once, run_to_its_end
from support.paths import TESTS

PROGRAM = TESTS / "programs" / "lightning_program.py"
LAUNCHERS = {
    "Lightning's own launcher": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
}

PLAIN = ["BatchNorm2d", "InstanceNorm2d", "BatchNorm1d"]
SYNCHRONISED = ["SynchronizedBatchNorm2d", "InstanceNorm2d", "SynchronizedBatchNorm1d"]


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.long) for name in LAUNCHERS])
def found(request, server, tmp_path_factory):
    def train(folder: Path) -> None:
        environ = {**os.environ, "STATSD_BN_ENDPOINT": server.endpoint, "STATSD_BN_JOB": folder.name}
        run_to_its_end([*LAUNCHERS[request.param], PROGRAM, folder], environ)

    folder = made_once(tmp_path_factory, f"lightning {request.param}", train)
    return [torch.load(folder / f"{rank}.pt") for rank in range(training.MEMBERS)]


def test_weights_and_running_statistics_are_those_of_the_whole_batch(found):
    model = training.network()
    for fits in ("after one fit", "after two fits"):
        expected = training.train(model)
        for of_rank in found:
            assert of_rank[fits].keys() == expected.keys()
            torch.testing.assert_close(of_rank[fits], expected, rtol=1e-10, atol=1e-12)


def test_a_late_rank_gets_a_stack_request(found):
    log = " ".join(found[1]["log"])
    assert re.search(r"rank 0 is in .*lightning_program.py:\d+ on_train_batch_start", log), log


def test_the_training_changes_every_weight_that_learns():
    """Otherwise equality would prove nothing. The instance norm's bias does not change the last batch norm's output."""
    model = training.network()
    before = training.state(model)
    for name, value in training.train(model).items():
        assert name in {"3.bias", "6.bias"} or (value - before[name]).abs().max() > 1e-3, name


def test_the_model_is_synchronised_only_while_fit_runs(found):
    for of_rank in found:
        assert of_rank["during"] == SYNCHRONISED
        assert of_rank["tested"] == of_rank["after"] == PLAIN
        assert of_rank["warnings"] == []


def test_the_connection_lasts_as_long_as_fit(found):
    for rank, of_rank in enumerate(found):
        assert f"rank {rank} of {training.MEMBERS}, open" in of_rank["connection during"]
        assert of_rank["connection after"] == "None"


def test_an_open_connection_is_used_and_kept(found):
    layers, phases = 2, 2
    for of_rank in found:
        rounds, closed = of_rank["own connection"]
        assert rounds == layers * phases * training.STEPS * training.EPOCHS
        assert not closed


def test_a_rank_that_fails_is_named_to_the_others_and_all_models_have_torchs_layers_again(found):
    lost, failed = (of_rank["failure"] for of_rank in found)
    assert failed == ("MemoryError", "rank 1 has no more", PLAIN)
    kind, text, layers = lost
    assert (kind, layers) == ("ReplicaLost", PLAIN)
    assert "rank 1" in text
    assert "MemoryError: rank 1 has no more" in text


@pytest.fixture
def plugin():
    from client.integrations.lightning import StatsdBNLayerSync  # noqa: PLC0415 - takes seconds

    return StatsdBNLayerSync()


@pytest.mark.parametrize(
    "options",
    [{"affine": False}, {"track_running_stats": False}, {"affine": False, "track_running_stats": False}, {}],
    ids=str,
)
def test_revert_gives_back_the_layer_that_apply_took(plugin, options):
    model = nn.Sequential(nn.BatchNorm2d(3, **options)).eval()
    before = dict(model.state_dict())
    during = plugin.apply(model)
    assert isinstance(during[0], client.SynchronizedBatchNorm2d)
    after = plugin.revert(during)
    assert type(after[0]) is nn.BatchNorm2d
    assert not after[0].training
    assert after.state_dict().keys() == before.keys()
    assert all(value is before[name] or torch.equal(value, before[name]) for name, value in after.state_dict().items())
    assert repr(after) == repr(nn.Sequential(nn.BatchNorm2d(3, **options)))


def test_layers_that_the_user_has_synchronised_stay_so(plugin):
    group = client.Group("mine", size=1)
    mine = client.SynchronizedBatchNorm1d(3, group=group)
    model = nn.Sequential(nn.BatchNorm1d(3), mine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = plugin.revert(plugin.apply(model))
    assert type(model[0]) is nn.BatchNorm1d
    assert model[1] is mine
    assert mine.group == group


def test_nothing_to_revert_is_no_error(plugin):
    model = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU())
    layers = list(model)
    assert list(plugin.revert(plugin.revert(model))) == layers


def test_a_single_process_does_not_connect(plugin, monkeypatch):
    monkeypatch.delenv("STATSD_BN_ENDPOINT", raising=False)
    model = plugin.apply(nn.Sequential(nn.BatchNorm1d(3)))
    assert client.current_connection() is None
    model(torch.randn(4, 3)).sum().backward()


def test_only_an_exception_that_ends_the_training_reaches_the_others(plugin, server, job, monkeypatch):
    monkeypatch.setenv("STATSD_BN_ENDPOINT", server.endpoint)
    monkeypatch.setenv("STATSD_BN_JOB", job)
    world_sizes = Mock(side_effect=itertools.cycle([2, 1]))  # 2: `apply` connects; 1: the job's size, no wait
    monkeypatch.setattr(integrations, "distributed", Mock(get_rank=lambda: 0, get_world_size=world_sizes))
    leave = Mock(wraps=Sessions.leave)
    monkeypatch.setattr(Sessions, "leave", lambda sessions, cause: leave(sessions, cause))  # noqa: PLW0108 - a Mock is not bound
    model = nn.Sequential(nn.BatchNorm1d(3))
    try:
        fail()
    except MemoryError:
        plugin.revert(plugin.apply(model))
    plugin.apply(model)
    try:
        fail()
    except MemoryError:
        plugin.revert(model)
    causes = [call.args[1] for call in leave.call_args_list]
    assert causes == ["", "MemoryError: the batch is too large"]


def fail() -> None:
    raise MemoryError("the batch is too large")


def test_importing_the_client_imports_no_framework_and_no_compiler(tmp_path):
    """Empty modules replace the frameworks, to catch imports of packages that are not installed."""
    names = {"lightning", "pytorch_lightning", "accelerate", "mmengine", "mmcv", "monai"}
    for name in names:
        (tmp_path / f"{name}.py").touch()
    unwanted = {*names, "torch._dynamo"}
    program = f"import sys, client, client.integrations; found = {unwanted} & set(sys.modules); assert not found, found"
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env={**os.environ, "PYTHONPATH": paths})


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's use of torch
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_the_callback_logs_what_the_exchange_costs(tmp_path):
    from lightning.pytorch import LightningModule, Trainer  # noqa: PLC0415 - loads slowly
    from lightning.pytorch.loggers import CSVLogger  # noqa: PLC0415

    from client.integrations.lightning import StatsdBNMetrics  # noqa: PLC0415

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = training.network()

        def training_step(self, batch, _):
            return training.loss(self.network, *batch)

        def configure_optimizers(self):
            return training.optimizer(self.network)

    batches = DataLoader(TensorDataset(*training.samples()), batch_size=5)
    with client.connect():
        short = {"max_epochs": 1, "enable_progress_bar": False, "enable_checkpointing": False}
        logs = {"logger": CSVLogger(tmp_path, "", ""), "log_every_n_steps": 1}
        callbacks = [StatsdBNMetrics(every_n_steps=2)]
        Trainer(accelerator="cpu", devices=1, callbacks=callbacks, **logs, **short).fit(Module(), batches)
    logged = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [int(row["step"]) for row in logged] == [2, 4, 6]
    assert {row["statsd_bn/members"] for row in logged} == {"1.0"}


def test_a_step_of_several_batches_is_logged_once():
    from client.integrations.lightning import StatsdBNMetrics  # noqa: PLC0415 - loads slowly

    callback, logger = StatsdBNMetrics(every_n_steps=2), Mock()
    with client.connect():
        for step in (0, 0, 1, 1, 2, 2, 2, 3, 4):
            callback.on_train_batch_end(Mock(global_step=step, loggers=[logger]))
    assert [call.kwargs["step"] for call in logger.log_metrics.call_args_list] == [2, 4]
