"""Parse FlexGen's command line as FlexGen 0.1.8 does."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from helpers import options
from helpers.errors import Refused
from helpers.settings import RunSettings

# flex_opt.add_parser_arguments' own defaults, where they differ from this lab's.
DEFAULTS = {
    "model": "facebook/opt-6.7b",
    "split": [["100", "0", "100", "0", "100", "0"]],
    "gpu_batch_size": "4",
    "num_gpu_batches": "1",
    "prompt_len": "512",
    "gen_len": "32",
}
FLEXGENS = tuple(one.name for one in options.declared(RunSettings) if one.option.flexgen)
# Remarks on FlexGen's other flags.
NO_EFFECT = {
    "path": "weights are prepared once and shared by all runs",
    "cut_gen_len": "every token is generated and timed, none is projected",
    "log_file": "results are kept in results.jsonl of the output folder",
    "no_log": "results are kept in results.jsonl of the output folder",
    "verbose": "progress and results are always shown",
}


class OneLineParser(argparse.ArgumentParser):
    """An argparse parser that refuses in one line."""

    def error(self, message: str) -> NoReturn:
        raise Refused(message)


def add_arguments(parser: argparse.ArgumentParser, defaults: Mapping[str, str] | None = None) -> None:
    """Add every flag of FlexGen 0.1.8 to a parser, including those without effect here."""
    options.add_arguments(parser, RunSettings, *FLEXGENS, defaults=defaults)
    parser.add_argument("--offload-dir", metavar="DIR", help="where the disk tier lives during the run")
    group = parser.add_argument_group("accepted for FlexGen's sake, without effect")
    group.add_argument("--path", metavar="DIR", help=argparse.SUPPRESS)
    group.add_argument("--cut-gen-len", metavar="N", help=argparse.SUPPRESS)
    group.add_argument("--log-file", metavar="FILE", help=argparse.SUPPRESS)
    group.add_argument("--no-log", action="store_true", default=None, help=argparse.SUPPRESS)
    group.add_argument("--verbose", metavar="N", help=argparse.SUPPRESS)
    group.add_argument(
        "--sep-layer",
        nargs="?",
        const="true",
        metavar="BOOL",
        help="--path, --cut-gen-len, --log-file, --no-log, --verbose",
    )


def remarks(given: argparse.Namespace) -> list[str]:
    """One line for each flag that has no effect here. Raises Refused for what this lab can't do."""
    if given.sep_layer is not None:
        try:
            together = not options.flexgen_bool(given.sep_layer)
        except KeyError:
            raise Refused(f"--sep-layer {given.sep_layer}: neither true nor false") from None
        if together:
            raise Refused("--sep-layer false: this lab runs attention and MLP as separate layers only")
    return [
        f"--{name.replace('_', '-')} has no effect: {why}"
        for name, why in NO_EFFECT.items()
        if getattr(given, name) is not None
    ]


def is_command(text: str) -> bool:
    """Whether this is a shell line that runs FlexGen."""
    return re.search(r"(?:^|[\s/])(?:flexgen\.flex_opt|flex_opt\.py|flexgen\.dist_flex_opt)(?=\s|$)", text) is not None


def parse(words: Sequence[str] | str) -> argparse.Namespace:
    """The flags of a whole command line (`python3 -m flexgen.flex_opt --model ...`), FlexGen's defaults filled in.

    Lines that this lab printed may end in a comment with the lab's own flags; those count too. Raises Refused.
    """
    text = words if isinstance(words, str) else shlex.join(words) if len(words) > 1 else words[0]
    extra = re.search(r"# .*run with (--[^,;]*), which python -m helpers measure has", text)
    try:
        parts = shlex.split(text.replace("\\\n", " "), comments=True) if extra or len(words) != 1 else shlex.split(text)
    except ValueError as error:
        raise Refused(f"FlexGen's command line {text!r:.80}: {error}") from None
    if isinstance(words, str) and not is_command(text):
        raise Refused(f"{text!r:.80}: not a command line of FlexGen (python3 -m flexgen.flex_opt ...)")
    while parts and not parts[0].startswith("--"):  # !, $, time, python3 -m flexgen.flex_opt, VARIABLE=value
        parts.pop(0)
    for stop in (">", ">>", "|", "2>&1", "&", "&&", ";", "2>", "&>"):
        if stop in parts:
            parts = parts[: parts.index(stop)]
    parser = OneLineParser(add_help=False, allow_abbrev=True)
    add_arguments(parser)
    lab = [one.name for one in options.declared(RunSettings) if not one.option.flexgen]
    options.add_arguments(parser, RunSettings, *lab)
    found = parser.parse_args(parts + (extra[1].split() if extra else []))
    for name, default in DEFAULTS.items():
        if getattr(found, name) is None:
            setattr(found, name, default)
    return found


def values(given: argparse.Namespace) -> list[dict[str, Any]]:
    """The option values of a parsed command line, one mapping per run."""
    return options.given(given, RunSettings)
