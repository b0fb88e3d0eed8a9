"""Compilation and loading of the native core, and the reasons if it is missing."""

import re
import sys

import pytest

from client.native import build, library
from statsd_bn.errors import ConfigurationError

NO_COMPILER = {"PATH": ""}


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        (NO_COMPILER, "no C compiler: looked for CC, cc, gcc, clang"),
        ({"CC": "no-such-compiler -O1"}, "no-such-compiler: "),
        ({"CC": f"{sys.executable} -c 'raise SystemExit(3)'"}, f"{sys.executable} ended with 3: no message"),
    ],
)
def test_without_a_compiler_there_is_a_reason_and_no_library_of_other_sources(tmp_path, environ, reason):
    (tmp_path / build.LIBRARY).write_text("of other sources")
    assert build.compile_core(tmp_path, environ).startswith(reason)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ["", "1", "on"])
def test_the_core_is_in_use_by_default(monkeypatch, value):
    monkeypatch.setenv("STATSD_BN_NATIVE", value)
    core, reason = library._load.__wrapped__()
    assert (core is not None, reason) == (True, "")


def test_a_variable_turns_the_native_core_off(monkeypatch):
    monkeypatch.setattr(library, "_load", library._load.__wrapped__)
    monkeypatch.setenv("STATSD_BN_NATIVE", "0")
    assert library.library() is None
    assert library.description() == "native core: not in use, STATSD_BN_NATIVE is off"
    monkeypatch.setenv("STATSD_BN_NATIVE", "perhaps")
    with pytest.raises(ConfigurationError, match=r"STATSD_BN_NATIVE: expected one of 1, true, .*\s+got 'perhaps'"):
        library.library()


def test_a_library_of_another_version_is_refused(tmp_path, monkeypatch):
    absent, other = tmp_path / "absent.so", tmp_path / "other.so"
    other.write_text("no library")
    assert library.load(absent) == (None, f"it was not compiled when statsd_bn was installed: there is no {absent}")
    assert library.load(other)[1].startswith(f"{other} cannot be loaded: ")
    monkeypatch.setattr(library, "VERSION", 99)
    core, reason = library.load(library.PATH)
    assert core is None
    assert reason.startswith("expected version 99 of its interface in ")


def test_the_table_of_functions_has_the_types_of_the_header():
    letters = {"int": "i", "int64_t": "q", "uint64_t": "Q"}
    found = {}
    header = (build.HERE / "core" / "sbn.h").read_text()
    for result, name, inside in re.findall(r"SBN_API (\w+) (sbn_\w+)\(([^)]*)\)", header):
        arguments = [] if inside == "void" else inside.split(",")
        types = ["P" if "*" in one else letters[one.split()[0]] for one in arguments]
        found[name] = letters.get(result, "-") + "".join(types)
    assert found == library._FUNCTIONS
