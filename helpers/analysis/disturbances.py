"""What disturbed a run while it was measured, recognised in the notes that the samplers and the engine wrote."""

from __future__ import annotations

import re

from helpers.runs import Run

# A note's pattern, and its wording next to a figure. The pattern's group, if any, fills the braces.
_NOTES = (
    (r"core (?:ran at|slowed down to) ([\d, ]+) %", "the CPU core ran at {} % of its full speed"),
    (
        r"gave ([\d,]+ MiB) more than this run took|([\d,]+ MiB) were read from \S+ by something other",
        "{} read by others",
    ),
    (r"other process(?:es)? (?:on|came to) the GPU", "another process was on the GPU"),
    (r"\bpaused?\b|\bsuspended\b|\bstood still\b", "the machine paused during the run"),
    (r"slower than the emulated GPU in (\d+ of \d+) passes", "the CPU was too slow in {} emulated passes"),
)


def disturbance(run: Run) -> str:
    """The disturbance of the run in a few words; "" if none is known."""
    found = []
    for note in run.notes:
        for pattern, words in _NOTES:
            if match := re.search(pattern, note):
                figure = next(filter(None, match.groups()), "")
                lowest = min(figure.split(", "), key=float) if "%" in words else figure
                found.append(words.format(lowest))
    return "; ".join(dict.fromkeys(found))


def another_reader(run: Run) -> bool:
    """Whether something else read the disk during the run."""
    return "read by others" in disturbance(run)
