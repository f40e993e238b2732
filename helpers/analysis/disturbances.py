"""What disturbed a run while it was measured, recognised in the notes that the samplers and the engine wrote."""

from __future__ import annotations

import re

from helpers.runs import Run

# What a note says, and what it is called next to a figure. Groups of the pattern fill the braces.
_NOTES = (
    (r"core ran at ([\d, ]+) % of the fastest", "the CPU core ran at {0} % of its full speed"),
    (r"gave ([\d,]+ MiB) more than this run took", "something else read {0} from the disk"),
    (r"before the run: (\d+) \w+.* on the GPU", "another process was on the GPU"),
    (r"during the run (\d+) \w+.* came to the GPU", "another process was on the GPU"),
    (r"\b(?:paused?|suspended|stood still)\b", "the machine paused during the run"),
    (r"could not keep up|too slow for the emulat", "the CPU could not keep up with the emulation"),
)


def disturbance(run: Run) -> str:
    """What disturbed the run, in a few words; "" if nothing is known to have."""
    found = []
    for note in run.notes:
        for pattern, words in _NOTES:
            if match := re.search(pattern, note):
                found.append(words.format(*match.groups()))
    return "; ".join(dict.fromkeys(found))
