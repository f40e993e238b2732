"""Figures that someone wrote down: a CSV with one row per run."""

from __future__ import annotations

import csv
import io
import re
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from helpers import models, options
from helpers.analysis.readers.found import Found, Where
from helpers.errors import Refused
from helpers.settings import OffloadSplit, RunSettings, in_one_line

# Figures beyond these are typos, and would overflow arithmetic.
Positive = Annotated[float, Field(ge=1e-12, le=1e12)]
NotNegative = Annotated[float, Field(ge=0, le=1e12)]


def _flag(text: str) -> bool:
    try:
        return options.flexgen_bool(text)
    except KeyError:
        raise ValueError("neither true nor false") from None


def _lower(text: str) -> str:
    return text.lower()


class FiguresRow(BaseModel):
    """One row. Only `percent` and a throughput, or latencies, are required; empty cells are unknown."""

    model_config = ConfigDict(extra="ignore")

    run_id: str | None = None
    model: Annotated[str, BeforeValidator(lambda name: models.resolve(name).name)] | None = None
    percent: Annotated[OffloadSplit, BeforeValidator(OffloadSplit.parse)]
    gpu_batch_size: int | None = None
    num_gpu_batches: int | None = None
    prompt_len: int | None = None
    gen_len: int | None = None
    compress_weight: Annotated[bool, BeforeValidator(_flag)] | None = None
    compress_cache: Annotated[bool, BeforeValidator(_flag)] | None = None
    cpu_cache_compute: Annotated[bool, BeforeValidator(_flag)] | None = None
    overlap: Annotated[bool, BeforeValidator(_flag)] | None = None
    pin_weight: Annotated[bool, BeforeValidator(_flag)] | None = None
    attn_sparsity: Positive | None = None
    debug_mode: Annotated[Literal["breakdown", "fewer_batch"], BeforeValidator(_lower)] | None = None
    page_cache: Annotated[Literal["natural", "cold"], BeforeValidator(_lower)] | None = None
    disk_reader: Annotated[Literal["stock", "direct"], BeforeValidator(_lower)] | None = None
    copy_buffer: Annotated[Literal["stock", "fit"], BeforeValidator(_lower)] | None = None
    status: Annotated[Literal["done", "failed"], BeforeValidator(_lower)] | None = None
    reason: str | None = None
    wall_time_s: Positive | None = None
    total_throughput_tok_s: Positive | None = None
    prefill_latency_s: Positive | None = None
    decode_latency_s: NotNegative | None = None
    peak_gpu_mem_gib: NotNegative | None = None
    load_weight_s: NotNegative | None = None
    compute_layer_decoding_s: NotNegative | None = None
    disk_r_s_peak: NotNegative | None = None
    disk_rkb_s_peak: NotNegative | None = None
    disk_rareq_kb_peak: NotNegative | None = None
    disk_util_percent_peak: NotNegative | None = None
    bytes_from_disk: int | None = None
    gpu_mem_gib: Positive | None = None
    notes: str | None = None


# Common names for the columns, letters and digits only; `_` stands for anything else.
_ALIASES = {
    "run_id": ("run", "name", "id", "setting", "config"),
    "percent": ("percentage", "percentages", "split", "offload_split"),
    "gpu_batch_size": ("batch", "batch_size", "bs", "gbs"),
    "prompt_len": ("prompt", "prompt_length", "input_len"),
    "gen_len": ("gen", "gen_length", "output_len", "generated"),
    "compress_weight": ("compression", "compress", "compressed", "4_bit", "compress_weights"),
    "wall_time_s": ("wall_time", "total_latency_s", "total_latency", "latency", "latency_s", "time", "time_s"),
    "total_throughput_tok_s": (
        "throughput",
        "total_throughput",
        "throughput_token_s",
        "throughput_tok_s",
        "total_throughput_token_s",
        "throughput_tokens_s",
        "token_s",
        "tokens_s",
        "tok_s",
    ),
    "prefill_latency_s": ("prefill_latency", "prefill_s", "prefill"),
    "decode_latency_s": ("decode_latency", "decode_s", "decode"),
    "peak_gpu_mem_gib": ("peak_gpu_mem", "peak_gpu_mem_gb", "peak_memory_gb", "peak_gpu_memory_gb", "peak_gb", "peak"),
    "load_weight_s": ("load_weight", "load_weight_per_layer_s"),
    "compute_layer_decoding_s": ("compute_layer_decoding", "compute_layer_decoding_per_batch_s"),
    "disk_r_s_peak": ("r_s", "r_s_peak"),
    "disk_rkb_s_peak": ("rkb_s", "rkb_s_peak"),
    "disk_rareq_kb_peak": ("rareq_sz", "rareq_sz_peak"),
    "disk_util_percent_peak": ("util", "util_peak", "util_percent"),
}
_BY_ALIAS = {alias: name for name, aliases in _ALIASES.items() for alias in aliases}
_WHOLE = ("gpu_batch_size", "num_gpu_batches", "prompt_len", "gen_len", "bytes_from_disk")
_TEXT = ("run_id", "reason", "notes", "model", "percent")
_UNITS = {"rmb_s": "disk_rkb_s_peak in KiB/s", "ms": "seconds", "mib": "GiB", "mb": "GiB"}

TEMPLATE = """\
# One row per run; GiB = 2^30 bytes, FlexGen's "GB". Only percent and throughput are required, empty cells are unknown.
# percent: FlexGen's six numbers. disk_*: the peaks of iostat -x -k. Lines that start with # are skipped; an example:
# mine-1,0 0 100 0 100 0,4,128,16,false,,0.357,0.588,,,1972,252500,128,99.6
run_id,percent,gpu_batch_size,prompt_len,gen_len,compress_weight,debug_mode,total_throughput_tok_s,peak_gpu_mem_gib,\
load_weight_s,compute_layer_decoding_s,disk_r_s_peak,disk_rkb_s_peak,disk_rareq_kb_peak,disk_util_percent_peak
"""


def is_csv(text: str) -> bool:
    lines = _lines(text)
    return bool(lines) and "percent" in _columns(next(csv.reader([lines[0][1]], delimiter=_separator(lines[0][1]))))


def read(text: str, file: str) -> tuple[list[Found], list[str]]:
    """The runs of a CSV, and remarks on the file. Raises Refused naming the line, the column and the value.

    Separators are commas, semicolons or tabs; with semicolons or tabs, decimal commas are read too.
    """
    lines = _lines(text)
    if not lines:
        raise Refused(f"{file}: empty; it needs a header and a line per run")
    separator = _separator(lines[0][1])
    reader = csv.reader(io.StringIO("\n".join(line for _, line in lines)), delimiter=separator, skipinitialspace=True)
    try:
        rows = [(lines[min(reader.line_num, len(lines)) - 1][0], [cell.strip() for cell in cells]) for cells in reader]
    except csv.Error as error:
        raise Refused(f"{file}, line {lines[min(reader.line_num, len(lines)) - 1][0]}: not CSV ({error})") from error
    rows = [row for row in rows if any(row[1])]
    if not rows:
        raise Refused(f"{file}: empty; it needs a header and a line per run")
    columns = _columns(rows[0][1])
    ignored = _check_header(file, rows[0][0], rows[0][1], columns)
    if len(rows) == 1:
        raise Refused(f"{file}: a header and no rows")
    found = [_found(file, line, columns, cells, separator != ",") for line, cells in rows[1:]]
    remarks = [f"{file}: column{'s' if len(ignored) > 1 else ''} ignored: {', '.join(ignored)}"] if ignored else []
    return found, remarks


def _lines(text: str) -> list[tuple[int, str]]:
    """Numbered lines without comments; a quoted cell may not hold a line break."""
    lines = re.split(r"\r\n|\n|\r", text.removeprefix("\ufeff"))
    return [(i, line) for i, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")]


def _separator(header: str) -> str:
    return max((",", ";", "\t"), key=header.count)


def _columns(header: list[str]) -> list[str]:
    """The fields that the header's names stand for; other names as they are."""
    simple = [re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") for name in header]
    known = [_BY_ALIAS.get(name, name) for name in simple]
    # A table of this lab has an index in `row` or `run` next to `run_id`: the field's own name wins over an alias.
    return [raw if name in simple and raw != name else name for raw, name in zip(simple, known)]


def _check_header(file: str, line: int, header: list[str], columns: list[str]) -> list[str]:
    """The columns without a meaning here. Raises Refused for missing and doubtful ones."""
    fields = FiguresRow.model_fields
    if "percent" not in columns:
        raise Refused(f"{file}, line {line}: no column percent (FlexGen's six numbers); --template shows the columns")
    for name in columns:
        if name in fields and columns.count(name) > 1:
            raise Refused(f"{file}, line {line}: column {name!r} appears twice")
    for raw, name in zip(header, columns):
        unit = next((word for word in _UNITS if name.endswith(f"_{word}") or name == word), None)
        if name not in fields and unit:
            raise Refused(f"{file}, line {line}: column {raw!r}: give {_UNITS[unit]}; --template shows the columns")
    return [raw for raw, name in zip(header, columns) if name not in fields and raw]


def _found(file: str, line: int, columns: list[str], cells: list[str], decimal_commas: bool) -> Found:
    where = Where(file, line)
    while len(cells) > len(columns) and not cells[-1]:  # a trailing comma
        cells = cells[:-1]
    if len(cells) > len(columns):
        raise Refused(f"{where}: {len(cells)} cells, the header has {len(columns)}")
    texts = {name: text for name, text in zip(columns, cells) if text and name in FiguresRow.model_fields}
    for name in texts.keys() - set(_TEXT):
        if decimal_commas:
            texts[name] = texts[name].replace(",", ".")
        if name in _WHOLE:  # pandas writes a column of whole numbers with a gap as 4.0
            texts[name] = re.sub(r"\.0+$", "", texts[name])
    if "percent" in texts:
        texts["percent"] = (
            texts["percent"].replace(",", " ").replace("-", " ").replace("/", " ")
            if (re.fullmatch(r"\d+(?:[-,/ ]+\d+){5}", texts["percent"]))
            else texts["percent"]
        )
    else:
        raise Refused(f"{where}, column percent: empty, six whole numbers are needed")
    try:
        row = FiguresRow.model_validate(texts).model_dump(exclude_none=True)
        row["percent"] = OffloadSplit.parse(texts["percent"])
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0]) if error.errors()[0]["loc"] else ""
        advice = (
            "" if name in (*_TEXT, "debug_mode") else "; leave an unknown figure empty, with the reason in `reason`"
        )
        raise Refused(f"{where}, column {name}: {_in_words(error, texts.get(name, ''))}{advice}") from None
    found = Found(where, sources=[where], name=row.pop("run_id", f"line {line}"))
    settings = {one.name for one in options.declared(RunSettings)}
    found.values = {name: row.pop(name) for name in list(row) if name in settings}
    found.values["split"] = row.pop("percent")
    if "notes" in row:
        row["notes"] = (row["notes"],)
    found.figures = row
    _from_latencies(found)
    return found


def _in_words(error: ValidationError, text: str) -> str:
    said = in_one_line(error)
    return said if text and text.split(" ")[0] in said else f"{text!r}: {said}"


def _from_latencies(found: Found) -> None:
    """Prefill and decode latency give the wall time where it isn't stated."""
    figures = found.figures
    if "wall_time_s" not in figures and {"prefill_latency_s", "decode_latency_s"} <= set(figures):
        figures["wall_time_s"] = figures["prefill_latency_s"] + figures["decode_latency_s"]
