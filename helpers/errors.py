"""What a person is told when something cannot be done, or was not as it should be."""

from __future__ import annotations

import sys
from typing import Any


class Refused(ValueError):
    """Nothing was started: one line that names the value and the rule it breaks."""


def say_warning(message: Warning | str, *_: Any) -> None:
    """In the place of `warnings.showwarning`: a warning as its sentence. The line of code that gave it says nothing
    to who reads it here."""
    print(f"warning: {message}", file=sys.stderr)
