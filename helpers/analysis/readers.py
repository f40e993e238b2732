"""Figures from files: a result log, or a CSV that someone wrote."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers import models, options, paths
from helpers.analysis.matching import run_id
from helpers.errors import Refused
from helpers.results import Log
from helpers.runs import Run, from_record
from helpers.settings import OffloadSplit, RunSettings


def read(path: str | Path) -> tuple[Run, ...]:
    """The rows of a `.csv` of figures or of a `.jsonl` result log. Raises Refused."""
    path = Path(path)
    readers = {".csv": read_csv, ".jsonl": read_jsonl}
    if path.suffix.lower() not in readers:
        raise Refused(f"{path}: neither a .csv of figures nor a .jsonl result log")
    paths.check_file(path)
    if not os.path.exists(path):
        raise Refused(f"{path}: no such file")
    return readers[path.suffix.lower()](path)


def read_jsonl(path: str | Path) -> tuple[Run, ...]:
    """One point for each run of a result log: its last record that is done, else its last failure.

    Raises Refused if the log holds no readable record.
    """
    latest = Log(Path(path)).latest()
    if not latest:
        raise Refused(f"{path}: holds no readable record")
    return tuple(from_record(run_id(record.settings), record) for record in latest.values())


# ---- CSV ------------------------------------------------------------------------------------------------------------


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError
    return value


def _positive(text: str) -> float:
    value = _number(text)
    if value == 0:
        raise ValueError
    return value


def _whole(text: str) -> int:
    value = float(text)  # pandas writes a column of whole numbers with a gap as 4.0
    if value != int(value):
        raise ValueError
    return int(value)


def _flag(text: str) -> bool:
    return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError
        return text.lower()

    return parse


# Column: how it is read, and what it must be. An empty cell is None.
_COLUMNS: dict[str, tuple[Callable[[str], Any], str]] = {
    "run_id": (str, "a name"),
    "model": (lambda name: models.resolve(name).name, "a model FlexGen knows"),
    "percent": (OffloadSplit.parse, "six whole numbers"),
    "gpu_batch_size": (_whole, "a whole number"),
    "num_gpu_batches": (_whole, "a whole number"),
    "prompt_len": (_whole, "a whole number"),
    "gen_len": (_whole, "a whole number"),
    "compress_weight": (_flag, "true or false"),
    "debug_mode": (_one_of("breakdown", "fewer_batch"), "breakdown or fewer_batch"),
    "page_cache": (_one_of("natural", "cold"), "natural or cold"),
    "status": (_one_of("done", "failed"), "done or failed"),
    "reason": (str, "text"),
    "wall_time_s": (_positive, "a number above 0"),
    "total_throughput_tok_s": (_positive, "a number above 0"),
    "peak_gpu_mem_gib": (_number, "a number"),
    "load_weight_s": (_number, "a number"),
    "compute_layer_decoding_s": (_number, "a number"),
    "disk_r_s_peak": (_number, "a number"),
    "disk_rkb_s_peak": (_number, "a number"),
    "disk_rareq_kb_peak": (_number, "a number"),
    "disk_util_percent_peak": (_number, "a number"),
    "bytes_from_disk": (_whole, "a whole number"),
    "gpu_mem_gib": (_positive, "a number above 0"),
    "notes": (lambda text: (text,), "text"),
}
_REQUIRED = ("model", "percent", "gpu_batch_size", "prompt_len", "gen_len")
_SETTINGS = [one.name for one in options.declared(RunSettings)]


def read_csv(path: str | Path) -> tuple[Run, ...]:
    """Figures that someone wrote down, one row a run, as points of kind "quoted".

    Needed columns: model, percent, gpu_batch_size, prompt_len, gen_len; every other column of
    `outputs/reference/t4-colab/figures.csv`, and status, reason, page_cache, bytes_from_disk,
    gpu_mem_gib and notes, may be left out or empty. A column of another name is refused.
    Raises Refused naming the line, the column and the value.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{path}: not a readable UTF-8 text file ({error})") from error
    reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    try:
        lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if any(map(str.strip, cells))]
    except csv.Error as error:
        raise Refused(f"{path}, line {reader.line_num}: not CSV ({error})") from error
    if not lines:
        raise Refused(f"{path}: empty, a header line and one line a run are needed")
    header = [name.lower() for name in lines[0][1]]
    _check_header(path, header)
    if len(lines) == 1:
        raise Refused(f"{path}: a header and no rows")
    source = f"{path.resolve().parent.name}/{path.name}"
    return tuple(_csv_point(path, source, line, header, cells) for line, cells in lines[1:])


def _check_header(path: Path, header: list[str]) -> None:
    missing = [name for name in _REQUIRED if name not in header]
    if missing:
        raise Refused(f"{path}, line 1: no column {', '.join(missing)}; cells are separated by commas")
    for name in header:
        if name not in _COLUMNS:
            raise Refused(f"{path}, line 1: column {name!r} is not known; known are {', '.join(_COLUMNS)}")
        if header.count(name) > 1:
            raise Refused(f"{path}, line 1: column {name!r} stands twice")


def _csv_point(path: Path, source: str, line: int, header: list[str], cells: list[str]) -> Run:
    if len(cells) != len(header):
        raise Refused(f"{path}, line {line}: {len(cells)} cells, the header has {len(header)}")
    fields: dict[str, Any] = {}
    for name, text in zip(header, cells):
        parse, rule = _COLUMNS[name]
        if not text:
            if name in _REQUIRED:
                raise Refused(f"{path}, line {line}, column {name}: empty, {rule} is needed")
            continue
        try:
            fields[name] = parse(text)
        except Refused as error:
            raise Refused(f"{path}, line {line}, column {name}: {error}") from None
        except (ValueError, KeyError, OverflowError):
            raise Refused(
                f"{path}, line {line}, column {name}: {text!r} is not {rule}; "
                "leave a figure that is not known empty and say why in a column `reason`"
            ) from None
    try:
        assumed = ("page_cache",) if "page_cache" not in fields else ()
        fields["split"] = fields.pop("percent")
        settings = {name: fields.pop(name) for name in _SETTINGS if name in fields}
        return Run(
            run_id=fields.pop("run_id", f"line {line}"),
            kind="quoted",
            source=source,
            settings=RunSettings.of(device="cuda", **settings),
            assumed=assumed,
            **fields,
        )
    except Refused as error:
        raise Refused(f"{path}, line {line}: {error}") from None
