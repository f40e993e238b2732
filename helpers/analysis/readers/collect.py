"""Any mix of files and folders to runs: recognise each file, put logs and runs together, ask for what is missing."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers import homework, paths
from helpers.analysis.matching import run_id
from helpers.analysis.plausibility import remarks_on
from helpers.analysis.readers import figures_csv, flexgen_output, iostat, results_log
from helpers.analysis.readers.found import Found
from helpers.errors import Refused
from helpers.results import Kind, Machine
from helpers.runs import Run
from helpers.settings import RunSettings

REFERENCES = paths.ROOT / "outputs" / "reference"
LARGE, LARGEST_TEXT = 10**7, 2**30  # bytes
_SKIPPED_FOLDERS = ("tables", "figures", "notebooks", "machine")  # of this lab's own output folder
# Assumed where a source doesn't state it.
ASSUMED = {"model": homework.MODEL["cuda"], **homework.WORKLOAD["cuda"].model_dump()}


@dataclass(frozen=True)
class About:
    """What the person says about the machine that measured. GiB; `disk_rate_gb_s` in 10^9 bytes per second."""

    machine_name: str = ""
    gpu_memory_gib: float | None = None
    cpu_memory_gib: float | None = None
    disk_rate_gb_s: float | None = None


@dataclass(frozen=True)
class Collected:
    """The runs, and remarks on the files as a whole."""

    runs: tuple[Run, ...]
    remarks: tuple[str, ...] = ()


@dataclass
class _Contents:
    """What the files hold so far."""

    found: list[Found] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    disks: list[tuple[Path, iostat.DiskLog]] = field(default_factory=list)
    folders: dict[str, Path] = field(default_factory=dict)  # of each file that has runs, by its name
    remarks: list[str] = field(default_factory=list)
    say: Callable[[str], None] = lambda _: None


def collect(
    given: Sequence[str | Path], about: About | None = None, say: Callable[[str], None] = lambda _: None
) -> Collected:
    """The runs of files and folders of any kind that can be read here. `say` is told before a large file is read.

    Raises Refused, in one line that says how to supply it, for whatever a file can't answer.
    """
    contents = _Contents(say=say)
    for one in map(Path, given):
        path = Path(os.path.expanduser(one))
        if os.path.isdir(path):
            _read_folder(path, contents)
        else:
            _read(path, contents)
    found = _merged(contents.found)
    _attach_disks(found, contents)
    runs = [*contents.runs, *_runs(found, contents, given, about or About())]
    if not runs:
        raise Refused(f"{', '.join(map(str, given))}: no run in it")
    return Collected(tuple(runs), tuple(dict.fromkeys(contents.remarks)))


def read(path: str | Path) -> tuple[Run, ...]:
    """The runs of one file or folder. Raises Refused."""
    return collect([path]).runs


def read_jsonl(path: str | Path) -> tuple[Run, ...]:
    return results_log.read(Path(path))


read_csv = read


# ---- files


def _read_folder(folder: Path, contents: _Contents) -> None:
    """Every file that can be read; the others are named in a remark."""
    own_log = (folder / "results.jsonl").is_file()
    left_out, before = [], len(contents.found) + len(contents.runs)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        parts = path.relative_to(folder).parts
        if any(part.startswith(".") for part in parts) or (own_log and parts[0] in _SKIPPED_FOLDERS):
            continue
        if own_log and len(parts) == 1 and path.name != "results.jsonl":
            continue
        try:
            _read(path, contents)
        except Unrecognised:
            left_out.append(str(path.relative_to(folder)))
    if len(contents.found) + len(contents.runs) == before and not contents.disks:
        raise Refused(f"{folder}: no file in it holds runs")
    if left_out:
        contents.remarks.append(f"{folder}: left out, of no kind known here: {', '.join(left_out[:10])}")


class Unrecognised(Refused):
    """A file of no kind that can be read here."""


def _read(path: Path, contents: _Contents) -> None:
    paths.check_file(path)
    try:
        path.stat()
    except OSError as error:  # a name that is too long counts as missing
        raise Refused(f"{str(path)[:200]}: {error.strerror or 'no such file'}".replace("No such", "no such")) from None
    if path.stat().st_size > LARGE:
        contents.say(f"reading {path} ({path.stat().st_size / 1e6:,.0f} MB) ...")
    if path.suffix.lower() == ".jsonl":
        contents.runs += results_log.read(path)
        return
    if path.stat().st_size > LARGEST_TEXT:
        raise Unrecognised(f"{path}: over 1 GiB, too large for figures")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Refused(f"{path}: cannot be read ({error.strerror})") from error
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"  # PowerShell's > writes UTF-16
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        if path.suffix.lower() == ".csv" or b"\0" in data[:4096]:
            raise Unrecognised(f"{path}: not a readable UTF-8 text file ({error})") from None
        text = data.decode("utf-8", errors="replace")
    contents.folders[path.name] = path.parent
    if path.suffix.lower() == ".ipynb" or text.lstrip().startswith('{"cells"') or '"nbformat"' in text[-2000:]:
        _read_notebook(path, text, contents)
    else:
        _read_text(path, text, contents)


def _read_text(path: Path, text: str, contents: _Contents) -> None:
    name, known = path.name, False
    if flexgen_output.is_output(text) or flexgen_output.NAME.search(name):
        contents.found += flexgen_output.read(text, name)
        known = True
    if iostat.is_iostat(text):
        contents.disks.append((path, iostat.read(text, name)))
        known = True
    if not known and (path.suffix.lower() in (".csv", ".tsv") or figures_csv.is_csv(text)):
        found, remarks = figures_csv.read(text, name)
        contents.found += found
        contents.remarks += remarks
        known = True
    if not known:
        raise Unrecognised(
            f"{path}: neither FlexGen's nor iostat's output, nor a .csv of figures, a .jsonl log or a notebook"
        )


def _read_notebook(path: Path, text: str, contents: _Contents) -> None:
    """The outputs of an executed notebook, each cell's source above them."""
    try:
        cells = json.loads(text)["cells"]
        texts = [_cell_text(cell) for cell in cells if cell["cell_type"] == "code"]
        numbers = [i for i, cell in enumerate(cells, 1) if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unrecognised(f"{path}: not a readable notebook ({error!r})") from None
    before = len(contents.found) + len(contents.disks)
    for number, cell in zip(numbers, texts):
        if flexgen_output.is_output(cell):
            contents.found += flexgen_output.read(cell, path.name, number)
        if iostat.is_iostat(cell):
            contents.disks.append((path, iostat.read(cell, f"{path.name}, cell {number}")))
    if len(contents.found) + len(contents.disks) == before:
        raise Unrecognised(
            f"{path}: no cell shows output of FlexGen or iostat; execute it and save it with its outputs"
        )


def _cell_text(cell: dict[str, Any]) -> str:
    parts = ["".join(cell.get("source", ""))]
    for output in cell.get("outputs", ()):
        parts.append("".join(output.get("text", "") or output.get("data", {}).get("text/plain", "")))
    return "\n".join(parts)


# ---- putting together


def _merged(found: Iterable[Found]) -> list[Found]:
    """One run for a result that a log file and a terminal both show."""
    merged: list[Found] = []
    for one in found:
        latencies = one.only_checks.get("latencies_s")
        twin = next(
            (
                other
                for other in merged
                if latencies
                and other.where.file != one.where.file
                and other.only_checks.get("latencies_s") == latencies
                and all(other.values.get(k) in (None, v) or v is None for k, v in one.values.items() if k == "split")
            ),
            None,
        )
        if twin is None:
            merged.append(one)
            continue
        twin.values = one.values | {name: value for name, value in twin.values.items() if value is not None}
        twin.figures = {**one.figures, **twin.figures}
        if "load_weight_s" in twin.figures:
            twin.values["debug_mode"] = "breakdown"
        twin.sources += one.sources
        twin.remarks = list(dict.fromkeys((*twin.remarks, *one.remarks)))
        twin.asks = twin.asks and one.asks
    return merged


def _attach_disks(found: list[Found], contents: _Contents) -> None:
    """Give each iostat log to its run: by name, by folder, or as the only run that reads the disk."""
    for path, disk in contents.disks:
        reads = [
            one
            for one in found
            if (split := one.values.get("split")) is not None
            and split.weights_disk
            and not one.values.get("debug_mode")
            and "status" not in one.figures
        ]
        for candidates in _claims(reads, path, disk, contents):
            if len({_name(one) for one in candidates}) == 1:  # the same run twice: the report shows the last
                _attach(candidates[-1], disk)
                break
        else:
            if not reads:
                raise Refused(f"{path}: no run of these files reads the disk; leave it out")
            choices = dict.fromkeys(f"{_name(one)}.iostat.txt for {_settings(one).in_words}" for one in reads)
            names = "; ".join(choices)
            raise Refused(f"{path}: which run does it belong to? Rename it: {names}")


def _claims(reads: list[Found], path: Path, disk: iostat.DiskLog, contents: _Contents) -> Iterator[list[Found]]:
    """The runs that an iostat log may belong to by one sign after another, the surest first."""
    yield [one for one in reads if one.where.cell is not None and f", cell {one.where.cell}," in f"{disk.where},"]
    yield [one for one in reads if path.name.startswith(f"{_name(one)}.")]
    yield [one for one in reads if path.name.startswith(Path(one.where.file).stem)]
    yield [one for one in reads if _split_in(path.name) == str(one.values["split"])]
    yield [one for one in reads if contents.folders.get(one.where.file) == path.parent]
    yield reads


def _settings(one: Found) -> RunSettings:
    values = {name: value for name, value in one.values.items() if value is not None}
    return RunSettings.of(**(ASSUMED | {"device": "cuda"} | values))


def _name(one: Found) -> str:
    return one.name or run_id(_settings(one))


def _split_in(name: str) -> str:
    match = re.search(r"(\d+(?:[-_ ]\d+){5})", name)
    return re.sub(r"[-_]", " ", match[1]) if match else ""


def _attach(one: Found, disk: iostat.DiskLog) -> None:
    series = disk.series
    requests = [size for size in series.request_kib if size is not None]
    utils = [util for util in series.util_percent if util is not None]
    one.figures |= {
        "disk": series,
        "disk_r_s_peak": max(series.reads_per_s),
        "disk_rkb_s_peak": max(series.read_kib_per_s),
        "disk_rareq_kb_peak": max(requests, default=None),
        "disk_util_percent_peak": max(utils, default=None),
    }
    one.sources.append(disk.where)
    whole_log = "disk peaks are those of the whole iostat log, loading before the run included"
    one.figures["notes"] = (*one.figures.get("notes", ()), *disk.remarks, whole_log)


def _runs(found: Sequence[Found], contents: _Contents, given: Sequence[str | Path], about: About) -> list[Run]:
    paths_ = [Path(one).resolve() for one in given]
    kind: Kind = "measured by you"
    if all(REFERENCES in path.parents for path in paths_):
        kind = "quoted"
    one_file = len(paths_) == 1 and paths_[0].is_file()
    source = about.machine_name or (f"{paths_[0].parent.name}/{paths_[0].name}" if one_file else "your machine")
    runs = []
    for one in found:
        if one.figures.pop("projected", False) and "load_weight_s" not in one.figures:
            contents.remarks.append(
                f"{one.where}: left out, projected by --debug-mode or --cut-gen-len; FlexGen prints its timers only to "
                "the terminal"
            )
            continue
        runs.append(_run(one, kind, source, about))
    contents.remarks += [f"{run.run_id}: {remark}" for run in runs for remark in run.remarks]
    return runs


def _run(one: Found, kind: Kind, source: str, about: About) -> Run:
    if one.asks:
        raise Refused(one.asks)
    values = {name: value for name, value in one.values.items() if value is not None}
    if "split" not in values:
        raise Refused(
            f"{one.where}: the split is missing; write the run's command (python3 -m flexgen.flex_opt --percent ...) "
            "on a line above its output, or give the file the name that FlexGen gives its log"
        )
    known = {"status", "total_throughput_tok_s", "wall_time_s", "load_weight_s"} & set(one.figures)
    if kind == "measured by you" and not known and not values.get("debug_mode"):
        raise Refused(f"{one.where}: neither a throughput nor latencies; write why in a column `reason`, status failed")
    assumed = tuple(name for name in (*ASSUMED, "page_cache") if name not in values)
    try:
        settings = _settings(one)
        machine = _machine(about)
        run = Run(
            run_id=one.name or run_id(settings),
            kind=kind,
            source=source,
            sources=tuple(dict.fromkeys(map(str, one.sources))),
            settings=settings,
            assumed=assumed,
            machine=machine,
            **({"gpu_mem_gib": about.gpu_memory_gib} | one.figures),
        )
    except Refused as error:
        raise Refused(f"{one.where}: {error}") from None
    if "total_throughput_tok_s" not in one.figures and run.wall_time_s and kind != "quoted":
        run = run.model_copy(update={"total_throughput_tok_s": settings.workload.generated_tokens / run.wall_time_s})
    return run.model_copy(update={"remarks": (*one.remarks, *remarks_on(run))})


def _machine(about: About) -> Machine | None:
    if not (about.machine_name or about.gpu_memory_gib or about.cpu_memory_gib):
        return None
    return Machine(
        name=about.machine_name or "your machine",
        gpu_mem_gib=about.gpu_memory_gib,
        ram_gib=about.cpu_memory_gib,
        disk_read_gb_s=about.disk_rate_gb_s,
    )
