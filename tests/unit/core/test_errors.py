import pickle

import pytest

from statsd_bn import errors
from statsd_bn.errors import BY_CODE, StatsdBNError, from_wire


def tree(root: type[StatsdBNError] = StatsdBNError) -> list[type[StatsdBNError]]:
    return [root, *(leaf for branch in root.__subclasses__() for leaf in tree(branch))]


every_error = pytest.mark.parametrize("error", tree(), ids=lambda error: error.__name__)


def test_every_code_is_unique():
    codes = [error.code for error in tree()]
    assert sorted(codes) == sorted(set(codes))
    assert sorted(BY_CODE) == sorted(codes)


def test_the_tree_in_the_docstring_is_the_tree():
    drawn = [line.replace("│", " ") for line in errors.__doc__.splitlines() if "──" in line]
    # Each level of the drawing is four columns wide.
    found = [(line.index("──") // 4, line.split("── ")[1].split()[0]) for line in drawn]
    expected = [(len(error.__mro__) - len(StatsdBNError.__mro__), error.__name__) for error in tree()[1:]]
    expected = [(1 if name == "ConfigurationError" else depth, name) for depth, name in expected]
    assert found == expected


@every_error
def test_an_error_from_the_wire_is_of_its_own_class(error):
    found = from_wire(error.code, "expected 1, got 2", {"expected": 1, "got": [2]})
    assert type(found) is error
    assert found.message == str(found) == "expected 1, got 2"
    assert found.fields == {"expected": 1, "got": [2]}


def test_an_unknown_code_gives_the_base_class():
    found = from_wire("of-the-future", "new trouble", {"a": 1})
    assert type(found) is StatsdBNError
    assert (str(found), found.fields) == ("new trouble", {"a": 1})


@every_error
def test_a_pickled_error_keeps_its_message_and_fields(error):
    found = pickle.loads(pickle.dumps(error("no", member=3, missing=[1, 2])))  # noqa: S301 - our own bytes
    assert type(found) is error
    assert (found.message, found.args, found.fields) == ("no", ("no",), {"member": 3, "missing": [1, 2]})


def test_a_configuration_error_is_a_value_error():
    with pytest.raises(ValueError, match="wrong flag"):
        raise errors.ConfigurationError("wrong flag")
