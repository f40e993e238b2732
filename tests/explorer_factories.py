"""States of the explorer, and runs as the lab would have recorded them."""

from factories import make_record
from helpers import lab
from helpers.explorer.moves import moved
from helpers.settings import OffloadSplit, RunSettings


def at(bench, **controls):
    """The bench's start with some controls moved, one after another."""
    state = bench.start
    for control, value in controls.items():
        state = moved(state, control, value, bench)
    return state


def t4(bench, **controls):
    """The hand-in's machine, model and workload, with some controls moved."""
    return at(bench, **({"machine": "t4-colab", "model": "opt-1.3b"} | controls))


def logged(bench, percent, latencies, **options):
    """A run of the sweep as the lab would have recorded it here."""
    settings = bench.start.settings.replace(split=OffloadSplit.parse(percent), **options)
    where = lab.describe_machine("emulated")
    return make_record(
        percent,
        latencies,
        settings={name: getattr(settings, name) for name in RunSettings.model_fields},
        kind="measured on the emulated GPU",
        machine=where,
        key=lab.run_key(settings, where),
    )
