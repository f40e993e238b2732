"""FlexGen's results: its `.log` files, and whatever it printed to a terminal or a notebook.

A record is FlexGen's `write_benchmark_log`: sizes, peak, prefill, decode and total, on six lines. The options of a run
come from its command line or from the log file's name. FlexGen's "GB" is 2**30 bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from helpers import flexgen_command
from helpers.analysis.readers.found import Found, Where, clean, line_of
from helpers.errors import Refused
from helpers.models import KNOWN_MODELS, OptModel
from helpers.units import GIB

_NUMBER = r"([-+\d.]+(?:e[-+]?\d+)?|nan|inf)"
_GAP = r"(?:\s|rank #\d+:)+"  # tabs in the file, spaces when pasted
RECORD = re.compile(
    rf"model size:\s*{_NUMBER} GB{_GAP}cache size:\s*{_NUMBER} GB{_GAP}hidden size \(p\):\s*{_NUMBER} GB{_GAP}"
    rf"peak gpu mem:\s*{_NUMBER} GB{_GAP}(?:projected:\s*(True|False){_GAP})?"
    rf"prefill latency:\s*{_NUMBER} s{_GAP}prefill throughput:\s*{_NUMBER} token/s{_GAP}"
    rf"decode latency:\s*{_NUMBER} s{_GAP}decode throughput:\s*{_NUMBER} token/s{_GAP}"
    rf"total latency:\s*{_NUMBER} s{_GAP}total throughput:\s*{_NUMBER} token/s",
    re.IGNORECASE,
)
_START = re.compile(r"<run_flexgen>: args\.model: (\S+)")
_TIMER = re.compile(rf"(load_weight|compute_layer_decoding)\s+\(per-\w+\):\s*{_NUMBER} s")
_FINE_PEAK = re.compile(rf"TorchDevice: cuda\S*\s+cur_mem: {_NUMBER} GB,\s+peak_mem: {_NUMBER} GB")
_ERROR = re.compile(r"^(?:[\w.]*(?:Error|Exception)\b.*|Killed.*|.*CUDA out of memory.*)$", re.MULTILINE)
NAME = re.compile(
    r"(?P<program>fo|hf|ds)-(?P<size>[\w.]+?)-gbs(?P<gpu_batch_size>\d+)-ngbs(?P<num_gpu_batches>\d+)-"
    r"prompt(?P<prompt_len>\d+)-gen(?P<gen_len>\d+)-percent-(?P<percent>(?:\d+-){6})(?P<where>gpu|cpu)-cache"
    r"(?P<compw>-compw)?(?P<compc>-compc)?"
)
TOLERANCE = 0.02  # between figures that FlexGen rounds to three decimals


def is_output(text: str) -> bool:
    return bool(RECORD.search(text) or _START.search(text))


def read(text: str, file: str, cell: int | None = None) -> list[Found]:
    """The runs of a log or of printed output, failed ones included, in order."""
    text = clean(text)
    stated, program = _from_name(file)
    if program in ("hf", "ds"):
        names = {"hf": "Hugging Face", "ds": "DeepSpeed"}
        raise Refused(f"{file}: a log of FlexGen's {names[program]} baseline, not of FlexGen; leave it out")
    return [_run(text, file, cell, stated, command, result) for command, result in _stretches(text)]


@dataclass(frozen=True)
class _Event:
    offset: int
    kind: str  # command, start or record
    text: str = ""
    match: re.Match[str] | None = None
    begin: int = 0  # of the output that belongs to a record


def _events(text: str) -> Iterator[_Event]:
    """Commands, run starts and records, in the order of the text."""
    joined = re.compile(r"(?:^|\n)([^\n]*(?:\\\n[^\n]*)*)")
    for line in joined.finditer(text):
        if (flexgen_command.is_command(line[1]) and "--" in line[1]) or re.search(r"flex_opt\s*$", line[1]):
            yield _Event(line.start(1), "command", line[1])
    for start in _START.finditer(text):
        yield _Event(start.start(), "start", start[1])
    for record in RECORD.finditer(text):
        yield _Event(record.start(), "record", match=record)


def _stretches(text: str) -> Iterator[tuple[_Event | None, _Event]]:
    """Each command with its record, or with none if it failed; records without a command stand alone.

    Several commands before their results (a cell's source, then its output) are paired in order.
    """
    events = sorted(_events(text), key=lambda event: event.offset)
    blocks: list[tuple[list[_Event], list[_Event]]] = [([], [])]
    for event in events:
        if event.kind == "command" and blocks[-1][1]:
            blocks.append(([], []))
        blocks[-1][event.kind != "command"].append(event)
    for commands, outputs in blocks:
        yield from _paired(commands, outputs, text)


def _paired(commands: list[_Event], outputs: list[_Event], text: str) -> Iterator[tuple[_Event | None, _Event]]:
    # A run's outputs begin with its start line, if there is one.
    runs: list[list[_Event]] = []
    for event in outputs:
        if event.kind == "start" or not runs or any(one.kind == "record" for one in runs[-1]):
            runs.append([])
        runs[-1].append(event)
    if not commands:
        for run in runs:
            yield None, _outcome(run, text)
    elif len(runs) <= len(commands) and (len(runs) == len(commands) or len(commands) == 1):
        for command, some in zip(commands, [*runs, *[[]] * (len(commands) - len(runs))]):
            yield command, _outcome(some, text, command)
    elif not runs or all(_agrees(command, run) for command, run in zip(commands[-len(runs) :], runs)):
        for command in commands[: len(commands) - len(runs)]:  # ended before FlexGen's first line
            yield command, _outcome([], text, command)
        for command, some in zip(commands[len(commands) - len(runs) :], runs):
            yield command, _outcome(some, text, command)
    else:
        for run in runs:
            yield None, _outcome(run, text)


def _agrees(command: _Event, run: list[_Event]) -> bool:
    start = next((event.text for event in run if event.kind == "start"), "")
    return not start or start in command.text


def _outcome(run: list[_Event], text: str, command: _Event | None = None) -> _Event:
    """The record of a run's outputs, or a failure where they end without one."""
    begin = run[0].offset if run else command.offset if command else 0
    model = next((event.text for event in run if event.kind == "start"), "")
    for event in run:
        if event.kind == "record":
            return _Event(event.offset, "record", model, event.match, begin)
    return _Event(begin, "failed", model, begin=begin)


def _run(
    text: str, file: str, cell: int | None, stated: dict[str, Any], command: _Event | None, result: _Event
) -> Found:
    where = Where(file, line_of(text, result.offset), cell)
    found = Found(where, dict(stated), sources=[where])
    if command is not None:
        _add_command(found, command, Where(file, line_of(text, command.offset), cell))
    elif result.text:
        found.values.setdefault("model", result.text)
    if result.match is None:
        after = text[result.begin : _next_run(text, result.begin)]
        error = _ERROR.findall(after)
        found.figures = {"status": "failed", "reason": error[-1].strip()[:200] if error else "no result printed"}
        return found
    _add_record(found, result.match)
    before = text[result.begin : result.offset] if result.begin < result.offset else ""
    fine = _FINE_PEAK.search(before)
    if fine:
        found.figures["peak_gpu_mem_gib"] = _number(fine[2])
    timers = {name: _number(seconds) for name, seconds in _TIMER.findall(before)}
    if timers:
        found.figures |= {f"{name}_s": seconds for name, seconds in timers.items()}
        found.values.setdefault("debug_mode", "breakdown")
    elif result.match[5] == "True" and not found.values.get("debug_mode"):
        found.figures["projected"] = True
    _compare(found)
    return found


def _next_run(text: str, begin: int) -> int:
    starts = [match.start() for match in (*_START.finditer(text, begin + 1), *RECORD.finditer(text, begin + 1))]
    return min(starts, default=len(text))


def _add_command(found: Found, command: _Event, where: Where) -> None:
    line = command.text
    if re.search(r"[{$]\w", line):
        found.asks = f"{where}: the command holds a variable ({' '.join(line.split())[:60]}); write its value"
        return
    try:
        parsed = flexgen_command.parse(re.sub(r"^\s*(?:\[?In[^:]*:|[!%$+#]+)\s*", "", line))
        (found.values,) = flexgen_command.values(parsed)
    except (Refused, ValueError) as error:
        found.asks = f"{where}: {error}"
        return
    found.values.setdefault("debug_mode", None)
    found.figures["command"] = " ".join(line.split()).lstrip("!$+ ")
    if parsed.cut_gen_len:
        found.figures["projected"] = True
    if where not in found.sources:
        found.sources.insert(0, where)


def _number(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _add_record(found: Found, record: re.Match[str]) -> None:
    numbers = [_number(text) if i != 4 else None for i, text in enumerate(record.groups())]
    size, cache, _, peak, _, prefill_s, prefill_tok_s, decode_s, decode_tok_s, total_s, total_tok_s = numbers
    if None in (prefill_s, decode_s, total_s, total_tok_s):
        found.figures |= {"status": "failed", "reason": "FlexGen printed nan for its latencies"}
        return
    figures = {
        "peak_gpu_mem_gib": peak or None,
        "prefill_latency_s": prefill_s,
        "decode_latency_s": decode_s,
        "wall_time_s": total_s or None,
        "total_throughput_tok_s": total_tok_s or None,
    }
    found.figures |= {name: value for name, value in figures.items() if value is not None}
    found.only_checks = {
        "sizes": [name for name, model in KNOWN_MODELS.items() if size is not None and _prints(model, size)],
        "size_gib": size,
        "cache_gib": cache,
        "tokens": (total_s or 0) * (total_tok_s or 0),
        "prompt_tokens": (prefill_s or 0) * (prefill_tok_s or 0),
        "later_tokens": (decode_s or 0) * (decode_tok_s or 0),
        "latencies_s": (prefill_s, decode_s, total_s),
    }


def printed_model_gib(model: OptModel) -> float:
    """FlexGen's `model_bytes`, in GiB: it leaves out the output's copy of the token embedding, the positions, the last
    norm and two biases per layer, and counts one bias per token."""
    h, v = model.hidden_size, model.vocab_size
    left_out = 2 * (v * h + (model.max_positions + 2) * h + 2 * h + 2 * h * model.num_layers)
    return (model.weight_bytes + 2 * v - left_out) / GIB


def _prints(model: OptModel, size_gib: float) -> bool:
    return abs(printed_model_gib(model) - size_gib) <= 6e-4


def _from_name(file: str) -> tuple[dict[str, Any], str]:
    """The options in the name that FlexGen gives a log, and the program that wrote it."""
    match = NAME.search(file)
    if not match:
        return {}, ""
    from helpers.settings import OffloadSplit

    try:
        split = OffloadSplit.parse(match["percent"].rstrip("-").replace("-", " "))
    except Refused as error:
        raise Refused(f"{file}: {error}") from None
    values: dict[str, Any] = {
        name: int(match[name]) for name in ("gpu_batch_size", "num_gpu_batches", "prompt_len", "gen_len")
    }
    values |= {"model": f"opt-{match['size']}", "split": split, "compress_weight": bool(match["compw"])}
    values |= {"compress_cache": bool(match["compc"]), "cpu_cache_compute": match["where"] == "cpu"}
    return values, match["program"]


def _compare(found: Found) -> None:
    """Check the stated options against the record's own figures, and take the model from its size if need be."""
    checks, values = found.only_checks, found.values
    if not checks:
        return
    sizes = checks["sizes"]
    if not values.get("model") and len(sizes) == 1:
        values["model"] = sizes[0]
    elif sizes and str(values["model"]).rpartition("/")[2].lower() not in sizes:
        found.remarks.append(
            f"says {values['model']}, but its {checks['size_gib']:.3f} GiB are {' or '.join(sizes)}, used instead"
        )
        values["model"] = sizes[0]
    elif values.get("model") is None:
        return
    if not all(name in values for name in ("gpu_batch_size", "prompt_len", "gen_len")):
        _infer_workload(found)
        return
    batch = values["gpu_batch_size"] * values.get("num_gpu_batches", 1)
    slack = _slack(checks)
    for name, printed, stated in (
        ("generated tokens", checks["tokens"], batch * values["gen_len"]),
        ("prompt tokens", checks["prompt_tokens"], batch * values["prompt_len"]),
    ):
        if printed and abs(printed - stated) > slack * stated:
            found.remarks.append(
                f"batch {batch} x {stated // batch} is {stated} {name}, but latency x throughput is {printed:.0f}"
            )


def _slack(checks: dict[str, Any]) -> float:
    """The relative error that rounding to three decimals can cause."""
    least = min((seconds for seconds in checks["latencies_s"] if seconds), default=1.0)
    return TOLERANCE + 1e-3 / least


def _infer_workload(found: Found) -> None:
    """Batch and lengths from the token counts, where rounding leaves only one whole answer."""
    checks, values = found.only_checks, found.values
    if _slack(checks) > 2 * TOLERANCE:
        return
    batch = round(checks["tokens"] - checks["later_tokens"])
    if batch < 1:
        return
    gen_len, prompt_len = round(checks["tokens"] / batch), round(checks["prompt_tokens"] / batch)
    fits = abs(gen_len * batch - checks["tokens"]) < 0.5 and abs(prompt_len * batch - checks["prompt_tokens"]) < 0.5
    model = KNOWN_MODELS.get(str(values["model"]).rpartition("/")[2].lower())
    cache_gib = 4 * batch * (prompt_len + gen_len) * model.num_layers * model.hidden_size / GIB if model else None
    if fits and cache_gib is not None and abs(cache_gib - (checks["cache_gib"] or 0)) < 1e-3:
        values |= {"gpu_batch_size": batch, "num_gpu_batches": 1, "prompt_len": prompt_len, "gen_len": gen_len}
        found.remarks.append(f"batch {batch}, prompt {prompt_len} and {gen_len} tokens follow from the figures")
