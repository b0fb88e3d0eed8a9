"""Settings: which source wins, how errors and the log name it, and which arguments are refused."""

from pathlib import Path

import pytest

import client
from client.launch import launchers
from client.launch.launchers import ProcessGroup
from client.launch.settings import resolve
from statsd_bn import limits
from statsd_bn.errors import ConfigurationError
from support.sentences import says

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_RUN_ID": "run-7"}
SLURM = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_RESTART_COUNT": "3"}
OURS = {"STATSD_BN_ENDPOINT": "tcp://a:1", "STATSD_BN_JOB": "mine", "STATSD_BN_CURVE": "a.key"}
STORE = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}

WRONG_TYPES = [
    ({"rank": "1"}, "rank: expected an int, got '1'"),
    ({"rank": 1.0}, "rank: expected an int, got 1.0"),
    ({"rank": True}, "rank: expected an int, got True"),
    ({"world_size": "4"}, "world_size: expected an int, got '4'"),
    ({"world_size": [4]}, r"world_size: expected an int, got \[4\]"),
    ({"round_timeout": "600"}, "round_timeout: expected a number of seconds, got '600'"),
    ({"round_timeout": None}, "round_timeout: expected a number of seconds, got None"),
    ({"join_timeout": "60"}, "join_timeout: expected a number of seconds, got '60'"),
    ({"policy": None}, "policy: expected a str, got None"),
    ({"policy": ["elastic"]}, r"policy: expected a str, got \['elastic'\]"),
    ({"policy": "elastic", "min_members": "2"}, "min_members: expected an int, got '2'"),
    ({"min_members": "2"}, "min_members: expected an int, got '2'"),
    ({"job": 7}, "job: expected a str, got 7"),
    ({"endpoint": 5555}, "endpoint: expected a str, got 5555"),
    ({"endpoint": Path("a.socket")}, r"endpoint: expected a str, got PosixPath\('a.socket'\)"),
    ({"curve": 1}, "curve: expected a path, got 1"),
    ({"curve": b"a.key"}, "curve: expected a path, got b'a.key'"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_TYPES)
def test_an_argument_of_a_wrong_type_is_named(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        client.connect(**arguments)


def test_a_long_value_is_cut():
    with pytest.raises(ConfigurationError) as caught:
        resolve({}, rank="x" * 10_000)
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize("value", [10**400, -(10**400), 10**5000], ids=["401 digits", "-401 digits", "5001 digits"])
@pytest.mark.parametrize(
    ("name", "others"),
    [
        *(("rank", {"world_size": 2}), ("world_size", {"rank": 0})),
        ("min_members", {"rank": 0, "world_size": 2, "policy": "elastic"}),
        *((name, {}) for name in ("round_timeout", "join_timeout", "min_members", "abort_after", "job")),
    ],
)
def test_a_huge_integer_is_refused_in_few_words(name, others, value):
    with pytest.raises(ConfigurationError, match=f"^{name}: expected ") as caught:
        resolve({}, **others, **{name: value})
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    "text", ["9" * 400, f"-{'9' * 400}", "9" * 5000, str(2**63)], ids=["400", "-400", "5000", "64 bits"]
)
@pytest.mark.parametrize(
    "name", ["RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"]
)
def test_a_huge_integer_in_a_variable_is_refused_in_few_words(name, text):
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", name: text}
    with pytest.raises(ConfigurationError, match=f"^{name}: expected ") as caught:
        resolve(environ)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("restarts", ["-1", str(limits.MAX_COUNTER + 1)])
def test_a_number_of_restarts_that_no_message_can_carry_is_refused(restarts):
    with pytest.raises(ConfigurationError, match=r"^TORCHELASTIC_RESTART_COUNT: expected 0 to 281474976710655, got"):
        resolve({"TORCHELASTIC_RESTART_COUNT": restarts})


@pytest.mark.parametrize("seconds", [1, 1.5])
def test_a_timeout_may_be_an_int_or_a_float(seconds):
    assert resolve({}, round_timeout=seconds).member.round_timeout == seconds


def sources(environ, **arguments):
    found = resolve(environ, **arguments).resolved
    names = ("endpoint", "job", "rank", "world_size", "epoch", "curve")
    return [(found[name].value, found[name].source) for name in names]


def test_without_anything_there_are_defaults():
    assert sources({}) == [
        *((None, "default"), ("default", "default"), (0, "default"), (1, "default"), (0, "default")),
        (None, "default"),
    ]


def test_a_launchers_variables_win_over_defaults_and_torchruns_over_slurms():
    job, rank = ("slurm-4711.0", "SLURM_JOB_ID"), (5, "SLURM_PROCID")
    assert sources(SLURM)[1:5] == [job, rank, (8, "SLURM_STEP_NUM_TASKS"), (3, "SLURM_RESTART_COUNT")]
    assert sources({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"})[1] == ("default", "default")
    torchruns = [("run-7", "TORCHELASTIC_RUN_ID"), (1, "RANK"), (4, "WORLD_SIZE"), (2, "TORCHELASTIC_RESTART_COUNT")]
    assert sources({**SLURM, **TORCHRUN})[1:5] == torchruns


def test_our_variables_win_over_a_launchers():
    found = sources({**SLURM, **TORCHRUN, **OURS})
    assert found[:2] == [("tcp://a:1", "STATSD_BN_ENDPOINT"), ("mine", "STATSD_BN_JOB")]
    assert found[5] == ("a.key", "STATSD_BN_CURVE")


def test_arguments_win_over_all_variables():
    arguments = {"endpoint": "tcp://b:2", "job": "other", "rank": 2, "world_size": 3, "curve": "b.key"}
    found = sources({**TORCHRUN, **OURS}, **arguments)
    assert [one for one in found if one[1] == "argument"] == [(value, "argument") for value in arguments.values()]


def test_an_empty_variable_counts_as_missing():
    assert sources(dict.fromkeys([*OURS, *TORCHRUN, *SLURM], "")) == sources({})


def test_the_join_timeout_is_the_round_timeout_unless_it_is_given():
    assert str(resolve({}).resolved["join_timeout"]) == "join_timeout 600.0 (default)"
    assert str(resolve({}, round_timeout=5).resolved["join_timeout"]) == "join_timeout 5.0 (round_timeout)"
    assert str(resolve({}, round_timeout=5, join_timeout=9).resolved["join_timeout"]) == "join_timeout 9.0 (argument)"


def test_the_store_is_looked_for_only_with_a_launcher_or_a_world_size_and_without_an_endpoint():
    assert resolve({**TORCHRUN, **STORE}).store == ("a", 1)
    assert resolve({**STORE, "WORLD_SIZE": "1"}).store == ("a", 1)
    assert resolve(STORE, world_size=2, rank=0).source("store") == "MASTER_ADDR"
    assert resolve(STORE).store is None
    assert resolve({**TORCHRUN, **STORE}, endpoint="tcp://a:1").store is None
    assert resolve({**TORCHRUN, **STORE, "MASTER_PORT": "x"}, endpoint="tcp://a:1").store is None


@pytest.mark.parametrize(
    ("environ", "arguments", "message"),
    [
        ({"WORLD_SIZE": "0", "RANK": "0"}, {}, r"world_size: expected 1 to \d+, got 0 \(WORLD_SIZE\)$"),
        (TORCHRUN, {"rank": 4}, r"got 4 \(argument\); world_size 4 \(WORLD_SIZE\)$"),
        (TORCHRUN, {"world_size": 2}, r"^world_size: expected at least 4, as WORLD_SIZE says, got 2 \(argument\); "),
        (SLURM, {"world_size": 1}, r"^world_size: expected at least 8, as SLURM_STEP_NUM_TASKS says, got 1 "),
        ({"STATSD_BN_JOB": "a\nb"}, {}, r"^job: expected printable text .* \(STATSD_BN_JOB\)$"),
        ({"TORCHELASTIC_RUN_ID": "a\nb"}, {}, r"\(TORCHELASTIC_RUN_ID\)$"),
        (TORCHRUN, {"policy": "elastic", "min_members": 5}, r"1 to world_size 4 \(WORLD_SIZE\), got 5 \(argument\)$"),
    ],
)
def test_an_error_names_the_source_of_the_value(environ, arguments, message):
    with pytest.raises(ConfigurationError, check=says(message)):
        resolve(environ, **arguments)


def test_the_log_names_the_source_of_each_value(monkeypatch, caplog, tmp_path):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level("INFO", "statsd_bn.client"), pytest.raises(ConfigurationError):
        client.connect("tcp://a:1", curve=tmp_path / "missing")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("connecting with endpoint 'tcp://a:1' (argument), job 'run-7' (TORCHELASTIC_RUN_ID), ")
    assert "rank 1 (RANK), world_size 4 (WORLD_SIZE), round_timeout 600.0 (default), " in line


@pytest.mark.parametrize("environ", [{"RANK": "0", "WORLD_SIZE": "2"}, {}], ids=["launcher", "process group"])
def test_the_first_line_warns_that_more_ranks_are_awaited_than_launched(environ, monkeypatch, caplog, tmp_path):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launchers, "find_process_group", lambda: None if environ else ProcessGroup(0, 2))
    with caplog.at_level("INFO", "statsd_bn.client"), pytest.raises(ConfigurationError):
        client.connect("tcp://a:1", world_size=3, curve=tmp_path / "missing")
    who = "WORLD_SIZE" if environ else "process group"
    assert caplog.records[0].getMessage() == (
        f"world_size 3 (argument), but {who} has 2 processes: connect() waits up to 600 s for the other ranks, "
        "which must be started elsewhere; omit world_size if there are no others"
    )
    assert resolve({"RANK": "0", "WORLD_SIZE": "1"}, world_size=3).launched is None, "this process started the others"


def test_a_smaller_job_than_launched_needs_a_rank_or_is_elastic():
    assert resolve(TORCHRUN, rank=0, world_size=2).member.world_size == 2
    assert resolve(TORCHRUN, policy="elastic", world_size=2).member.world_size == 2


@pytest.mark.parametrize(("value", "reports_stacks"), [("0", False), ("no", False), ("1", True), (" ", True)])
def test_the_stack_report_setting_has_many_spellings(value, reports_stacks):
    assert resolve({"STATSD_BN_STACKS": value}).member.reports_stacks is reports_stacks
