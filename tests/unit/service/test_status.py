import re
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import zmq

import server.__main__ as command
from server.cli import status as status_module
from server.cli.status import ask, own_endpoint
from server.view.text import COUNTS, describe, with_verdicts
from statsd_bn import limits
from statsd_bn.errors import ConfigurationError, ServerUnreachable
from statsd_bn.members import NO_MEMBERS
from statsd_bn.messages import Failure, Registered, Status
from statsd_bn.text import unwrap
from statsd_bn.wire import PROTOCOL_VERSION, encode
from support.view_reports import group, member, waiting

WAIT_MILLISECONDS = 20_000

MEMBERS = (member(0, 0, place="host 1", replicas=4), member(1, 5, place="host 2", replicas=0))
WAITING = [waiting(12.34, 1, round="a key", step=5)]
GROUP = group(*MEMBERS, job="resnet", epoch=3, rounds_done=17, rounds_failed=1, waiting=WAITING)
REPORT = {"server": "abcd", "seconds": 61.7, "received": 40, "bad_frames": 2, "groups": [GROUP]}


@pytest.fixture(autouse=True)
def insecure(monkeypatch):
    monkeypatch.setenv("STATSD_BN_INSECURE", "1")


def test_a_report_reads_as_text():
    assert describe(REPORT) == (
        "server abcd, up 62 s, 40 messages, 2 bad frames\n"
        "\n"
        "resnet: Waiting for rank 1 (host 2) for 12 s in bn1\n"
        "  Look at what rank 1 does now. The others raise RoundTimeout after their\n"
        "    round_timeout, 600 s by default.\n"
        "  2 of 2 ranks, epoch 3, 17 rounds done, 1 failed\n"
        "  rank     step  steps/s  median     p99  awaited  process, now\n"
        "     0        0        -       -       -        -  host 1, 4 replicas: waits 12\n"
        "                                                   s in bn1\n"
        "     1        5        -       -       -        -  host 2, awaited: the others\n"
        "                                                   wait 12 s for it in bn1\n"
        "  waiting 12.3 s for rank 1: forward of bn1, step 5"
    )


def test_no_line_is_longer_than_80_columns():
    place = "a-very-long-host-name-of-a-cluster.example.org, pid 1234567"
    members = [{**one, "place": place, "transport": "server"} for one in GROUP["members"]]
    waits = [{**GROUP["waiting"][0], "layer": "encoder.blocks.12.attention.projection.norm"}]
    more = {"why_not_faster": "rank 1: " + "the reason " * 20, "lost": "rank 0 was lost: " + "because " * 40}
    for changed in ({}, more):
        text = describe(REPORT | {"groups": [GROUP | {"members": members, "waiting": waits, **changed}]})
        assert max(map(len, text.splitlines())) <= 80


def test_the_group_that_needs_attention_comes_first():
    broken = GROUP | {"job": "broken", "lost": "rank 1 was lost", "waiting": []}
    text = describe(REPORT | {"groups": [GROUP, broken]})
    assert text.index("broken: Broken: rank 1 was lost") < text.index("resnet: Waiting for rank 1")
    healthy, over = GROUP | {"waiting": []}, {**GROUP, "job": "vgg", "lost": "", "seconds": 9.0}
    text = describe(REPORT | {"groups": [healthy], "ended": [over]})
    assert text.index("resnet: Healthy") < text.index("vgg: Finished"), "an ended job is the last one"


def test_the_json_has_the_verdicts():
    (group,) = with_verdicts(REPORT, 100.0)["groups"]
    assert group["verdict"] == {
        "state": "waiting",
        "severity": 2,
        "text": "Waiting for rank 1 (host 2) for 12 s in bn1",
        "since": 100.0 - 12.34,
        "step": None,
        "rank": 1,
        "advice": f"Look at what rank 1 does now. {TIMEOUT}",
        "also": [],
    }
    with pytest.raises(ServerUnreachable, match="malformed"):
        with_verdicts({"groups": [{}]}, 0.0)


def test_transports_get_a_line_once_the_members_have_reported_them():
    def transports_of(*transports, **more):
        contributors = [
            contributor | {"transport": transport}
            for contributor, transport in zip(GROUP["members"], transports, strict=True)
        ]
        text = describe(REPORT | {"groups": [GROUP | {"members": contributors, **more}]})
        return re.findall(r", (transport .*?)  rank ", text.replace("\n    ", " ").replace("\n", ""))

    assert transports_of("", "") == []
    assert transports_of("shared_memory", "shared_memory") == ["transport shared_memory"]
    assert transports_of("server", "server", why_not_faster="rank 1: no") == ["transport server: rank 1: no"]
    assert transports_of("shared_memory", "server", why_not_faster="x") == [
        "transport shared_memory of rank 0, server of rank 1: x"
    ]


def test_a_usual_wait_between_ranks_gets_no_line():
    waits = [{**GROUP["waiting"][0], "seconds": seconds} for seconds in (0.49, 0.5)]
    text = describe(REPORT | {"groups": [GROUP | {"waiting": waits}]})
    assert text.count("  waiting ") == text.count("  waiting 0.5 s") == 1


def test_a_job_broken_between_rounds_does_not_claim_that_no_round_failed():
    text = describe(REPORT | {"groups": [GROUP | {"lost": "rank 1 was lost", "rounds_failed": 0}]})
    assert "resnet: Broken: rank 1 was lost\n" in text
    assert ", 17 rounds done\n" in text


def test_ended_jobs_are_listed_with_their_end():
    job = {"job": "resnet", "epoch": 3, "world_size": 2, "rounds_done": 17, "lost": "", "seconds": 61.7}
    text = describe(REPORT | {"groups": [], "ended": [job | {"lost": "rank 1 was lost"}, job | {"job": "vgg"}]})
    assert text.splitlines()[1:] == [
        "",
        "resnet: Broken: rank 1 was lost",
        "  Look at the ranks' logs, and start the job again.",
        "  ended 62 s ago, 2 ranks, epoch 3, 17 rounds done",
        "",
        "vgg: Finished in good order: 2 ranks, 17 rounds",
        "  ended 62 s ago, 2 ranks, epoch 3, 17 rounds done",
    ]


def test_of_several_runs_of_one_name_the_latest_is_listed():
    job = {"job": "resnet", "epoch": 3, "world_size": 2, "rounds_done": 17, "lost": "", "seconds": 61.7}
    text = describe(REPORT | {"groups": [], "ended": [job, job | {"lost": "rank 1 was lost", "seconds": 90.0}]})
    assert "Finished in good order" in text
    assert "rank 1" not in text


def test_the_reason_of_a_broken_job_does_not_repeat_the_job():
    lost = "rank 1 (b, pid 2) was lost: no sign of life; in job 'resnet', group 'world', step 5"
    by = {"rank": 1, "place": "b, pid 2", "how": "is lost", "cause": "no sign of life", "step": 5}
    text = describe(REPORT | {"groups": [GROUP | {"lost": lost, "lost_by": by, "waiting": []}]})
    assert text.splitlines()[2] == "resnet: Broken: rank 1 (b, pid 2) fell silent at step 5"


PAIR = {"group": "pair", "missing": 1}


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"missing": 1, "members": GROUP["members"][:1]}, "Waiting for rank 1 to join: 1 of 2 ranks are here"),
        (PAIR | {"members": GROUP["members"][1:]}, "Waiting for 1 rank besides rank 1 to join: 1 of 2 ranks are here"),
        (
            PAIR | {"world_size": 4, "missing": 2},
            "Waiting for 2 ranks besides ranks 0-1 to join: 2 of 4 ranks are here",
        ),
        ({"lost": "member 1 left"}, "Broken: member 1 left"),
    ],
)
def test_a_group_in_trouble_is_marked(changed, text):
    assert text in describe({**REPORT, "groups": [{**GROUP, "waiting": [], **changed}]}).replace("\n  ", " ")


def test_a_shortened_report_counts_the_omitted_groups():
    assert describe({**REPORT, "left_out": 3}).splitlines()[-1] == "and 3 more groups"
    assert "No job" not in describe({**REPORT, "groups": [], "left_out": 1})


def test_an_idle_server_has_no_jobs():
    assert describe({**REPORT, "groups": []}).splitlines()[1:] == [
        "",
        "No job yet: it appears here once its ranks connect",
    ]


def test_a_running_server_answers(server, job):
    report = ask(server.endpoint)
    assert set(report) == {"server", "seconds", "received", "bad_frames", "groups", "ended", *COUNTS}
    assert job not in describe(report)


@pytest.fixture
def nobody() -> str:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind("tcp://127.0.0.1:*")
        return router.last_endpoint.decode().rstrip("\0")


def test_a_command_without_a_server_exits_with_4(nobody, monkeypatch, capsys):
    monkeypatch.setattr(command, "ask", partial(ask, seconds=0.05))
    assert command.main(["status", nobody]) == 4
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("statsd_bn: no server listens at ")
    assert unwrap(output.err).count("\n") == 1


@pytest.mark.parametrize("name", ["status", "check"])
@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("nonsense", "tcp://HOST:PORT or ipc://PATH"),
        ("udp://127.0.0.1:1", "tcp://HOST:PORT or ipc://PATH"),
        ("tcp://127.0.0.1", "tcp://HOST:PORT with a port of 0 to 65535"),
        ("tcp://127.0.0.1:99999", "tcp://HOST:PORT with a port of 0 to 65535"),
        ("tcp://127.0.0.1:20011x", "tcp://HOST:PORT with a port of 0 to 65535"),
    ],
)
def test_an_invalid_endpoint_exits_with_2(name, endpoint, expected, capsys):
    assert command.main([name, endpoint]) == 2
    error = unwrap(capsys.readouterr().err)
    assert error == f"statsd_bn: endpoint: expected {expected}, got {endpoint!r}\n"


def test_a_port_that_only_a_server_knows_exits_with_2(capsys):
    assert command.main(["status", "tcp://127.0.0.1:*"]) == 2
    assert "expected tcp://HOST:PORT or ipc://PATH, got 'tcp://127.0.0.1:*'" in unwrap(capsys.readouterr().err)


def test_a_check_without_an_endpoint_asks_where_clients_connect(server, nobody, monkeypatch):
    monkeypatch.setattr(command, "CHECK_SECONDS", 0.5)
    monkeypatch.setenv("STATSD_BN_ENDPOINT", server.endpoint)
    assert command.main(["check"]) == 0
    monkeypatch.setenv("STATSD_BN_BIND", nobody)
    assert command.main(["check"]) == 4


def test_a_check_without_an_endpoint_checks_this_hosts_server(server, nobody, monkeypatch, capsys):
    monkeypatch.setattr(command, "CHECK_SECONDS", 0.05)
    monkeypatch.setenv("STATSD_BN_BIND", nobody)
    assert command.main(["check"]) == 4
    assert capsys.readouterr().err.startswith(f"statsd_bn: no server listens at {nobody} (connection refused)")
    monkeypatch.setattr(command, "CHECK_SECONDS", 5.0)
    monkeypatch.setenv("STATSD_BN_BIND", server.endpoint)
    assert command.main(["check"]) == 0


@pytest.mark.parametrize(
    ("bound", "reached"),
    [
        ("tcp://0.0.0.0:7000", "tcp://127.0.0.1:7000"),
        ("tcp://*:7000,ipc:///run/statsd_bn", "tcp://127.0.0.1:7000"),
        ("tcp://[::]:7000", "tcp://[::1]:7000"),
        ("tcp://10.0.0.7:7000", "tcp://10.0.0.7:7000"),
        ("tcp://lo:7000", "tcp://127.0.0.1:7000"),
        ("ipc:///run/statsd_bn", "ipc:///run/statsd_bn"),
    ],
)
def test_a_server_that_listens_on_all_addresses_is_reached_on_the_loopback_address(bound, reached):
    assert own_endpoint({"STATSD_BN_BIND": bound}) == reached


@pytest.mark.parametrize("bound", ["tcp://127.0.0.1:*", "tcp://127.0.0.1", "nonsense"])
def test_a_check_of_a_server_with_an_unknown_port_is_a_usage_error(bound, monkeypatch, capsys):
    monkeypatch.setenv("STATSD_BN_BIND", bound)
    with pytest.raises(ConfigurationError, match="STATSD_BN_BIND has no fixed port"):
        own_endpoint({"STATSD_BN_BIND": bound})
    assert command.main(["check"]) == 2
    assert repr(bound) in capsys.readouterr().err


@pytest.fixture
def somebody() -> Iterator[Callable[[bytes], str]]:
    threads = []
    with zmq.Context() as context:

        def listen(answer: bytes) -> str:
            router = context.socket(zmq.ROUTER)
            router.linger = WAIT_MILLISECONDS
            router.bind("tcp://127.0.0.1:*")
            endpoint = router.last_endpoint.decode().rstrip("\0")

            def run() -> None:
                with router:
                    if router.poll(WAIT_MILLISECONDS):
                        router.send_multipart([router.recv_multipart()[0], answer])

            thread = threading.Thread(target=run, daemon=True)
            threads.append(thread)
            thread.start()
            return endpoint

        yield listen
        for thread in threads:
            thread.join(timeout=30)
            assert not thread.is_alive()


def another_version(frame: bytes) -> bytes:
    return frame[:3] + b"\x63" + frame[4:]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (encode(Failure("protocol", "I am a teapot", {})), "gave no status: I am a teapot"),
        (encode(Registered(b"session0", b"server00", 0, 0, 0, NO_MEMBERS)), "gave no status: Registered"),
        (
            another_version(encode(Failure("version", "no", {}))),
            f"protocol version: expected {PROTOCOL_VERSION}, got 99",
        ),
        (b"SSH-2.0", "expected to begin with b'SBN'"),
    ],
    ids=["a failure", "another message", "another version", "no message"],
)
def test_an_answer_other_than_a_status_exits_with_4_and_one_line(somebody, capsys, answer, text):
    endpoint = somebody(answer)
    assert command.main(["status", endpoint]) == 4
    output = capsys.readouterr()
    assert output.out == ""
    assert text in unwrap(output.err)
    assert unwrap(output.err).count("\n") == 1


def test_the_view_refuses_an_invalid_report(somebody, capsys):
    assert command.main(["view", somebody(encode(Status({"groups": [{}]}))), "--http", "127.0.0.1:0"]) == 4
    output = capsys.readouterr()
    assert output.out == ""
    assert "a malformed one" in unwrap(output.err)


@pytest.mark.parametrize(
    "changed",
    [
        *({"world_size": limits.MAX_MEMBERS + 1}, {"world_size": 2**62, "missing": 2**62}),
        *({"world_size": 1e9, "missing": 1e9}, {"missing": -1}, {"members_left_out": 2**62}),
    ],
)
@pytest.mark.parametrize("options", [["status"], ["status", "--json"], ["view", "--http", "127.0.0.1:0"]], ids=str)
def test_a_number_of_members_that_no_group_can_have_is_refused(somebody, capsys, changed, options):
    report = REPORT | {"groups": [GROUP | {"members": [], "waiting": []} | changed]}
    assert command.main([*options, somebody(encode(Status(report)))]) == 4
    output = capsys.readouterr()
    assert output.out == ""
    (name, size), *_ = changed.items()
    assert f"{name}: expected an integer in [0, {limits.MAX_MEMBERS}], got {size!r}" in unwrap(output.err)
    assert unwrap(output.err).count("\n") == 1


def test_the_size_of_a_job_that_has_ended_is_checked_too(somebody, capsys):
    ended = [{"job": "digits", "epoch": 0, "world_size": 2**62, "rounds_done": 0, "lost": "", "seconds": 1.0}]
    assert command.main(["status", somebody(encode(Status(REPORT | {"groups": [], "ended": ended})))]) == 4
    assert f"world_size: expected an integer in [0, {limits.MAX_MEMBERS}]" in unwrap(capsys.readouterr().err)


def test_names_cannot_control_the_terminal_or_forge_a_line():
    members = [{"member": 0, "place": "höst\n\x1b[2Jno jobs", "participation": "takes_part", "step": 0, "replicas": 4}]
    text = describe(REPORT | {"groups": [GROUP | {"members": members, "waiting": []}]})
    assert text.splitlines()[6:] == [
        r"     0        0        -       -       -        -  höst\n\x1b[2Jno jobs, 4",
        "                                                   replicas: takes part",
    ]


TIMEOUT = "The others raise RoundTimeout after their round_timeout, 600 s by default."
NONSENSE = [{}, {**REPORT, "seconds": "long"}, {**REPORT, "groups": [{}]}, {**REPORT, "groups": 3}]


@pytest.mark.parametrize("report", NONSENSE)
def test_an_invalid_report_is_an_error_in_one_line(report):
    with pytest.raises(ServerUnreachable, match="malformed"):
        describe(report)


def test_a_check_at_an_interface_without_an_address_is_a_usage_error(monkeypatch):
    monkeypatch.setattr(status_module.socket, "if_nameindex", lambda: [(7, "nowhere0")])
    with pytest.raises(ConfigurationError, match=r"an interface with an address,\s+got 'nowhere0'"):
        own_endpoint({"STATSD_BN_BIND": "tcp://nowhere0:7000"})
