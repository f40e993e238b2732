"""User-facing errors and warnings."""

from __future__ import annotations

import sys
from typing import TextIO


class Refused(ValueError):
    """A request refused before anything started; its text is one line that names the value and the rule."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback."""
        return [f"Refused: {self}"]


def say_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Replacement for `warnings.showwarning` that prints the sentence alone, without the line of code behind it."""
    print(f"warning: {message}", file=sys.stderr)
