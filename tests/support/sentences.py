"""What an error says, whose text has line breaks for people."""

import re
from collections.abc import Callable

from statsd_bn.text import unwrap


def says(pattern: str) -> Callable[[BaseException], bool]:
    """For `pytest.raises(check=)`: whether a pattern is in an error's text, with its sentences in one piece each."""
    return lambda error: re.search(pattern, unwrap(str(error))) is not None
