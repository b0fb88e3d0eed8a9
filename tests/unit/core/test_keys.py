"""Key files of `python -m server keygen`, written and read."""

import logging
import os
import re
import stat
from pathlib import Path

import pytest
import zmq

from client.launch.own_server import member_keys, read_secret, server_keys
from client.launch.settings import resolve
from server.__main__ import main
from server.security.keygen import generate, load_clients, load_public, load_valid_clients
from statsd_bn import keys
from statsd_bn.errors import ConfigurationError
from statsd_bn.text import unwrap
from support.sentences import says

pytestmark = pytest.mark.skipif(not zmq.has("curve"), reason="this libzmq was built without CURVE")

KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"  # from RFC 26, CurveZMQ
OTHER = "D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_gets_key_pairs_for_the_server_and_one_client(tmp_path):
    folder = tmp_path / "keys"
    paths = generate(folder)
    expected = {"server.key", "server.key_secret", "clients/client.key", "secrets/client.key_secret"}
    assert files(folder) == expected == {str(path.relative_to(folder)) for path in paths}


def test_files_and_folders_are_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        generate(tmp_path / "keys", ["alice"])
    finally:
        os.umask(before)
    found = {path: mode(path) for path in (tmp_path / "keys", *(tmp_path / "keys").rglob("*"))}
    assert {found[path] for path in found if path.is_dir()} == {0o700}
    assert {found[path] for path in found if path.is_file()} == {0o600}


def test_written_keys_match_after_reading(tmp_path):
    generate(tmp_path, ["alice"], ["a-*", 'odd "name\\'])
    server = keys.load_server(tmp_path)
    client = keys.load_client(tmp_path / "secrets" / "alice.key_secret")
    (public,) = load_clients(tmp_path)
    assert client.server == server.public
    assert (public.name, public.key, public.jobs) == ("alice", client.pair.public, ("a-*", 'odd "name\\'))
    assert zmq.curve_public(client.pair.secret.encode()).decode() == client.pair.public
    assert zmq.curve_public(server.secret.encode()).decode() == server.public
    assert server.public in (tmp_path / "server.key").read_text()


def test_every_key_is_different(tmp_path):
    generate(tmp_path, ["a", "b"])
    text = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    found = re.findall(r'"(.{40})"', text)
    # The server's public key is in four files, each client's public key in two, each secret key in one.
    assert len(found) == 11
    assert len(set(found)) == 6


def test_a_client_can_be_added_later_and_knows_the_server(tmp_path):
    generate(tmp_path, ["alice"])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    generate(tmp_path, ["bob"])
    assert all(path.read_bytes() == held for path, held in before.items())
    assert keys.load_client(tmp_path / "secrets" / "bob.key_secret").server == keys.load_server(tmp_path).public


def test_existing_files_are_kept_and_no_new_one_is_written(tmp_path):
    generate(tmp_path, ["bob"])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigurationError, check=says(r"found .*bob\.key_secret.*nothing was written")):
        generate(tmp_path, ["alice", "bob"])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["", "../evil", "a/b", ".hidden", "x" * 65, "a b", "a\n"])
def test_an_invalid_file_name_is_refused(tmp_path, name):
    with pytest.raises(ConfigurationError, match="expected a name of 1 to 64 letters"):
        generate(tmp_path / "keys", [name])
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("pattern", ["", "a\nb"])
def test_an_invalid_pattern_is_refused(tmp_path, pattern):
    with pytest.raises(ConfigurationError, match="expected patterns"):
        generate(tmp_path / "keys", ["alice"], [pattern])


def test_a_generated_secret_is_unique_and_private_and_is_never_overwritten(tmp_path, capsys):
    before = os.umask(0)
    try:
        assert [main(["secret", str(tmp_path / name)]) for name in ("a", "b", "a")] == [0, 0, 2]
    finally:
        os.umask(before)
    secrets = [(tmp_path / name).read_text() for name in ("a", "b")]
    assert len(set(secrets)) == 2
    assert [mode(tmp_path / name) for name in ("a", "b")] == [0o600, 0o600]
    output = capsys.readouterr()
    assert output.out == f"wrote {tmp_path}/a\nwrote {tmp_path}/b\n"
    assert "found" in output.err
    assert not [one for one in secrets if one.strip() in output.out + output.err]


@pytest.mark.parametrize("folder_mode", [0o775, 0o1777])
def test_a_secret_may_be_written_into_a_group_writable_or_a_sticky_folder(tmp_path, folder_mode):
    tmp_path.chmod(folder_mode)
    assert main(["secret", str(tmp_path / "job.secret")]) == 0
    assert mode(tmp_path / "job.secret") == 0o600


@pytest.mark.parametrize("below", ["", "new"])
def test_a_secret_is_not_written_where_everybody_can_write(tmp_path, capsys, below):
    (tmp_path / below).mkdir(exist_ok=True)
    tmp_path.chmod(0o777)
    assert main(["secret", str(tmp_path / below / "job.secret")]) == 2
    assert f"secret: expected only this user to be able to write to {tmp_path}, got" in unwrap(capsys.readouterr().err)
    assert not (tmp_path / below / "job.secret").exists()


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"STATSD_BN_SECRET": "short"}, "STATSD_BN_SECRET: expected at least 32 random letters.*got 5 letters"),
        ({"STATSD_BN_SECRET": "changeme" * 8}, "got 64 letters, 7 different ones"),
        ({"STATSD_BN_SECRET_FILE": "/nowhere/secret"}, "STATSD_BN_SECRET_FILE: cannot read /nowhere/secret"),
        ({"STATSD_BN_SECRET_FILE": "/dev/zero"}, "STATSD_BN_SECRET_FILE: expected /dev/zero to be a file"),
        ({"STATSD_BN_SECRET": KEY, "STATSD_BN_SECRET_FILE": "/nowhere/secret"}, "expected one of .*got both"),
        ({}, "several nodes"),
    ],
)
def test_an_invalid_secret_is_refused_and_not_quoted(environ, problem):
    with pytest.raises(ConfigurationError, check=says(problem)) as caught:
        read_secret(environ)
    assert "changeme" not in str(caught.value)


def test_keys_are_derived_from_the_secret_and_the_job_and_match_each_other():
    server, member = server_keys(KEY, "a"), member_keys(KEY, "a")
    assert (member.server, member.pair.public) == (server.pair.public, server.client_key)
    for pair in (server.pair, member.pair):
        assert zmq.curve_public(pair.secret.encode()).decode() == pair.public
    others = [member_keys(secret, job) for secret, job in ((KEY, "b"), (OTHER, "a"))]
    publics = [server.pair.public, *(key for one in (member, *others) for key in (one.pair.public, one.server))]
    assert len(set(publics)) == 6
    assert keys.parse_server(server.text(), "here") == server
    assert not [secret for secret in (server.pair.secret, member.pair.secret) if secret in repr((server, member))]


@pytest.mark.parametrize(("folder_mode", "below"), [(0o777, "."), (0o1777, "."), (0o775, "."), (0o777, "new/keys")])
def test_keys_are_not_written_where_others_can_write_or_could_replace_the_folder(tmp_path, folder_mode, below):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(folder_mode)
    expected = says(rf"to write to {folder}, got mode {folder_mode:04o}" + ("; chmod go-w" if below == "." else ""))
    with pytest.raises(ConfigurationError, check=expected):
        generate(folder / below)
    assert list(folder.iterdir()) == []
    if below != ".":
        folder.chmod(0o1777)
        generate(folder / below)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("name", ["", "clients", "secrets"])
def test_keys_are_not_written_into_another_users_folder(tmp_path, name):
    folder = tmp_path / "keys"
    (folder / name).mkdir(parents=True)
    os.chown(folder / name, 65_534, 65_534)
    with pytest.raises(ConfigurationError, match=r"to belong to this user \(uid 0\), got uid 65534"):
        generate(folder)
    assert files(folder) == set()


@pytest.mark.parametrize("kind", ["pipe", "device", "huge", "folder"])
def test_an_invalid_key_file_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "clients" / "odd.key"
    path.parent.mkdir()
    make = {
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "huge": lambda: (path.touch(), os.truncate(path, 1 << 40)),
        "folder": path.mkdir,
    }
    make[kind]()
    expected = "at most 65536 bytes in" if kind == "huge" else "to be a file, got a folder, a pipe or a device"
    with pytest.raises(ConfigurationError, match=expected):
        load_clients(tmp_path)
    sound, problems = load_valid_clients(tmp_path)
    assert (sound, len(problems)) == ([], 1)


def test_the_command_names_the_files_and_no_key(tmp_path, capsys):
    assert main(["keygen", str(tmp_path), "--client", "alice", "--client", "bob", "--jobs", "a-*"]) == 0
    output = capsys.readouterr()
    assert output.out.count("wrote ") == 6
    made = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert not [key for key in re.findall(r'"(.{40})"', made) if key in output.out + output.err]
    assert main(["keygen", str(tmp_path), "--client", "bob"]) == 2
    assert "nothing was written" in capsys.readouterr().err


def test_a_clients_key_is_found_by_its_file_by_its_folder_or_by_the_environment(tmp_path):
    generate(tmp_path, ["client", "alice"])
    alice = resolve({"STATSD_BN_CURVE": str(tmp_path / "secrets" / "alice.key_secret")}).load_keys()
    assert alice == keys.load_client(tmp_path / "secrets" / "alice.key_secret")
    default = resolve({"STATSD_BN_CURVE": "/nowhere"}, curve=tmp_path).load_keys()
    assert default == keys.load_client(tmp_path / "secrets" / "client.key_secret")
    assert default != alice
    assert resolve({}).load_keys() is resolve({"STATSD_BN_CURVE": ""}).load_keys() is None


SOUND = f'public-key = "{KEY}"\nsecret-key = "{KEY}"\nserver-key = "{OTHER}"\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "public-key: expected a key of 40 letters, .*got none"),
        (SOUND.replace(KEY, KEY[:-1]), "public-key: expected a key of 40 letters, .*got something else"),
        (SOUND.replace(f'secret-key = "{KEY}"', "secret-key = 5"), "secret-key: expected a key"),
        (SOUND.replace("server-key", "no-key"), "server-key: expected a key"),
        (f"public-key = {KEY}", "is not a key file"),
        ("\xff", "is not a key file"),
    ],
)
def test_an_unsound_file_is_refused_and_not_quoted(tmp_path, text, problem):
    path = tmp_path / "x.key_secret"
    path.write_bytes(text.encode("latin-1"))
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match=problem) as caught:
        keys.load_client(path)
    assert str(path) in str(caught.value)
    assert KEY[:-1] not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("jobs", ["5", "[]", "[5]", '[""]', '"a"'])
def test_invalid_job_patterns_are_refused(tmp_path, jobs):
    path = tmp_path / "alice.key"
    path.write_text(f'public-key = "{KEY}"\njobs = {jobs}\n')
    with pytest.raises(ConfigurationError, check=says("jobs: expected patterns")):
        load_public(path)


def test_a_key_without_job_patterns_is_valid_for_all_jobs(tmp_path):
    path = tmp_path / "alice.key"
    path.write_text(f'public-key = "{KEY}"\n')
    assert load_public(path).jobs == ("*",)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigurationError, check=says(r"cannot read .*secrets/client\.key_secret: No such file")):
        keys.load_client(tmp_path)


def test_a_secret_that_others_can_read_is_warned_of(tmp_path, caplog):
    generate(tmp_path)
    with caplog.at_level(logging.WARNING):
        keys.load_client(tmp_path)
        assert not caplog.records
        (tmp_path / "secrets" / "client.key_secret").chmod(0o640)
        keys.load_client(tmp_path)
    assert "other users can read the secret key" in caplog.text


def test_printed_keys_contain_no_secret(tmp_path):
    generate(tmp_path)
    client, server = keys.load_client(tmp_path), keys.load_server(tmp_path)
    assert client.pair.public in repr(client)
    assert client.pair.secret not in repr(client)
    assert server.secret not in f"{server} {server!r}"


def test_a_key_names_its_tenant(tmp_path):
    generate(tmp_path, ["alice", "anna"], tenant="team-a")
    generate(tmp_path, ["bob"])
    clients = load_clients(tmp_path)
    assert {client.name: client.tenant for client in clients} == {"alice": "team-a", "anna": "team-a", "bob": ""}
    owners = {client.name: client.tenant_of("job") for client in clients}
    assert owners == {"alice": "tenant 'team-a'", "anna": "tenant 'team-a'", "bob": "tenant 'bob'"}


@pytest.mark.parametrize("line", ['tenant = "team a"', 'tenant = ["team-a"]', "tenant = 7"])
def test_an_invalid_tenant_name_is_refused(tmp_path, line):
    generate(tmp_path, ["alice"])
    path = tmp_path / "clients" / "alice.key"
    path.write_text(path.read_text() + line)
    with pytest.raises(ConfigurationError, match=r'tenant: expected a name such as "team-a"'):
        load_clients(tmp_path)
