"""The lab next to FlexGen's own command, on one machine in one go: `against_stock.py --parts PART...`

Parts, each as long as its settings and pairs make it; every measurement is a line of `--output` as soon as it is made,
and `--report` turns all lines into tables:

- `fidelity`: FlexGen's own command and the lab in turn: throughput, peak GPU memory, tokens.
- `whole-stock`, `whole-lab`: the homework's 13 commands as one types them, and `python -m helpers run q1 q2 q3 q4
  --repeats 1`.
- `direct`: `--disk-reader direct` beside FlexGen's reader, page cache cold, and beside a plain O_DIRECT reader.
- `overhead`: runs with and without what is sampled beside them.
- `page-cache`: a plain reader of weights that are in the page cache, by how they came there; no GPU needed.
- `small-host`: all weights on disk in a cgroup of 12 GiB, with FlexGen's copy buffers and fitted ones (needs root).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from helpers import home, homework, lab, results  # noqa: E402
from helpers.engine import direct_reader, launcher  # noqa: E402
from helpers.errors import Refused  # noqa: E402
from helpers.machine.ceilings import drop_from_page_cache  # noqa: E402
from helpers.results import RunRecord, Samples  # noqa: E402
from helpers.settings import RunSettings  # noqa: E402
from helpers.weights import store  # noqa: E402

PARTS = ("fidelity", "whole-stock", "whole-lab", "direct", "overhead", "page-cache", "small-host")
STOCK_LIMIT_S = 300
GIB = 2**30
COPY_THREADS = 4
COPIED = "copied, as FlexGen does"
CGROUPS = Path("/sys/fs/cgroup")
# What the homework asks to type: Q1's five commands, Q2's three, Q3's two with 4-bit weights (its others are Q1's),
# Q4's three. FlexGen has no command for the run with a cold page cache.
TYPED = [
    row.id
    for question, rows in homework.QUESTIONS.items()
    for row in rows
    if (question != "q3" or row.compress_weight) and row.page_cache != "cold"
]


# ---------------------------------------------------------------- measuring


def stock(settings: RunSettings, made: store.Weights, folder: Path, quick_start: bool) -> dict[str, Any]:
    """FlexGen's own command for these settings, and what it prints of itself."""
    arguments = settings.flexgen_arguments(str(made.path), str(folder / "offload"))[3:]
    flags = ["--quick-start"] * quick_start + ["--cold"] * (settings.page_cache == "cold")
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "stock.py"), *flags, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=STOCK_LIMIT_S,
    )
    wall_s = time.monotonic() - began_s
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return {"who": "stock", "wall_s": wall_s, **read_stock(done.stdout)}


def read_stock(printed: str) -> dict[str, Any]:
    """Throughput, peak and tokens (of the first and the last sequence) out of what `run_flexgen` prints."""

    def figure(pattern: str) -> float:
        found = re.search(pattern, printed)
        if not found:
            raise ValueError(f"FlexGen printed nothing like {pattern!r}:\n{printed[-1000:]}")
        return float(found[1])

    return {
        "throughput_tok_s": figure(r"total throughput: ([\d.]+) token/s"),
        "prefill_latency_s": figure(r"prefill latency: ([\d.]+) s"),
        "decode_latency_s": figure(r"decode latency: ([\d.]+) s"),
        "peak_gpu_mem_gib": figure(r"TorchDevice: cuda:0\s+cur_mem: [\d.]+ GB,\s+peak_mem: ([\d.]+) GB"),
        "tokens": [[int(word) for word in line.split()] for line in re.findall(r"^\d+: ([\d ]+)$", printed, re.M)],
    }


def ours(settings: RunSettings, folder: Path, **more: Any) -> dict[str, Any]:
    """The lab's own run of these settings, once."""
    began_s = time.monotonic()
    sweep = lab.run(settings, folder / "outputs", fresh=True, offload_root=folder / "lab", say=_say)
    (record,) = sweep.records.values()
    if record.failure:
        raise RuntimeError(f"{record.command}: {record.failure.kind}: {record.failure.message}")
    return {"who": "lab", "wall_s": time.monotonic() - began_s, **figures_of(record), **more}


def figures_of(record: RunRecord) -> dict[str, Any]:
    tokens = record.generated_tokens
    return {
        "throughput_tok_s": record.total_throughput_tok_s,
        "peak_gpu_mem_gib": record.peak_gpu_mem_gib,
        "tokens": [list(tokens[0]), list(tokens[-1])] if tokens else [],
        "prefill_latency_s": record.prefill_latency_s,
        "decode_latency_s": record.decode_latency_s,
        "total_latency_s": record.total_latency_s,
        "bytes_from_disk": record.bytes_from_disk,
        "bytes_expected_from_disk": record.bytes_expected_from_disk,
        "phases_s": record.phases_s,
        "core_speed": record.repeats[0].core_speed if record.repeats else None,
        "notes": list(record.notes),
    }


class Bench:
    """Measures, part by part, and keeps each measurement at once."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.device = lab.choose_device(options.device)
        self.made = store.prepare(options.model or homework.MODEL[self.device], _say)
        self.started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    def settings(self, row_id: str, **changes: Any) -> RunSettings:
        row = next(row for rows in homework.QUESTIONS.values() for row in rows if row.id == row_id)
        work = homework.WORKLOAD[self.device]
        if self.options.gen_len:
            work = work.model_copy(update={"gen_len": self.options.gen_len})
        found = row.settings(
            model=self.options.model or homework.MODEL[self.device], device=self.device, workload=work, repeats=1
        )
        return RunSettings.model_validate(found.model_copy(update=changes).model_dump())

    def keep(self, part: str, setting: str, **measured: Any) -> None:
        where = lab.describe_machine(self.device)
        line = {
            "part": part,
            "setting": setting,
            "run": self.started,
            "machine": where.name,
            "platform": where.platform,
            "versions": lab.versions(),
            **measured,
        }
        with open(self.options.output, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        _say(
            f"{part} {setting}: "
            + ", ".join(
                f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in measured.items()
                if isinstance(value, (float, str))
            )
        )

    def fidelity(self) -> None:
        self._read_all_weights()
        for row_id in self.options.settings or [*dict.fromkeys(TYPED), "q4-disk-cold"]:
            settings = self.settings(row_id)
            for pair in range(self.options.pairs):
                for who in ("stock", "lab") if pair % 2 == 0 else ("lab", "stock"):
                    if who == "stock":
                        found = stock(settings, self.made, self.folder, quick_start=True)
                    else:
                        found = ours(settings, self.folder)
                    self.keep("fidelity", row_id, pair=pair, page_cache=settings.page_cache, **found)

    def whole_stock(self) -> None:
        for number, row_id in enumerate(self.options.settings or TYPED):
            found = stock(self.settings(row_id), self.made, self.folder, quick_start=False)
            self.keep("whole", row_id, number=number, page_cache="natural", **found)

    def whole_lab(self) -> None:
        output = self.options.lab_output or self.folder / "whole"
        model = ["--model", self.options.model] if self.options.model else []
        began_s = time.monotonic()
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "helpers",
                "run",
                *homework.QUESTIONS,
                "--device",
                self.device,
                *model,
                "--repeats",
                "1",
                "--fresh",
                "--output",
                str(output),
            ],
            cwd=ROOT,
            stdout=sys.stderr,
        )
        wall_s = time.monotonic() - began_s
        for record in lab.Log(output / results.LOG_NAME):
            name = next(
                (
                    row.id
                    for rows in homework.QUESTIONS.values()
                    for row in rows
                    if self.settings(row.id) == record.settings
                ),
                record.settings.key,
            )
            self.keep(
                "whole",
                name,
                who="lab run",
                wall_s=record.duration_s,
                page_cache=record.settings.page_cache,
                **figures_of(record),
            )
        self.keep("whole", "all", who="lab", wall_s=wall_s, exit_code=done.returncode)

    def direct(self) -> None:
        runs = {
            "stock reader": self.settings("q1-5", page_cache="cold"),
            "direct reader": self.settings("q1-5", page_cache="cold", disk_reader="direct"),
            "direct reader, 4-bit": self.settings("q3-disk-4bit", page_cache="cold", disk_reader="direct"),
        }
        for pair in range(self.options.pairs):
            for name, settings in runs.items():
                found = ours(settings, self.folder)
                gb_s = found["bytes_expected_from_disk"] / found["total_latency_s"] / 1e9
                self.keep("direct", name, pair=pair, **{**found, "read_gb_s": gb_s})
                for block in (direct_reader.PART_BYTES, 2 * direct_reader.PART_BYTES):
                    gb_s = plain_read_gb_s(self._weight_files(), block)
                    self.keep("direct", f"plain O_DIRECT, {block // 2**20} MiB", pair=pair, read_gb_s=gb_s)

    def overhead(self) -> None:
        with_samplers = launcher.Sampler
        for row_id in self.options.settings or ["q1-1"]:
            settings = self.settings(row_id)
            for pair in range(self.options.pairs):
                for sampled in (True, False) if pair % 2 == 0 else (False, True):
                    launcher.Sampler = with_samplers if sampled else NoSampler  # type: ignore[misc, assignment]
                    try:
                        found = ours(settings, self.folder, sampled=sampled)
                    finally:
                        launcher.Sampler = with_samplers  # type: ignore[misc]
                    self.keep("overhead", row_id, pair=pair, **found)

    def page_cache(self) -> None:
        own = self._weight_files()
        copies = [self.folder / file.name for file in own]
        for file, copy in zip(own, copies):
            shutil.copy(file, copy)
        for pair in range(self.options.pairs):
            self.keep("page-cache", COPIED, pair=pair, read_gb_s=mapped_read_gb_s(copies))
            for how, fill in (("by reading", self._read_all_weights), ("by mapping", lambda: mapped_read_gb_s(own))):
                for file in own:
                    drop_from_page_cache(file)
                fill()
                self.keep("page-cache", f"from the disk, {how}", pair=pair, read_gb_s=mapped_read_gb_s(own))

    def small_host(self) -> None:
        settings = self.settings("q1-5")
        for copy_buffer in ("stock", "fit"):
            for file in self._weight_files():  # page cache is counted where it was read first
                drop_from_page_cache(file)
            with small_cgroup(self.options.small_host_gib * GIB) as cgroup:
                done = subprocess.run(
                    [
                        sys.executable,
                        "-m",
                        "helpers",
                        "measure",
                        "--device",
                        self.device,
                        "--model",
                        settings.model,
                        "--percent",
                        *homework.DISK.split(),
                        "--gen-len",
                        str(settings.workload.gen_len),
                        "--copy-buffer",
                        copy_buffer,
                        "--repeats",
                        "1",
                        "--fresh",
                        "--json",
                        "--output",
                        str(self.folder / f"small-{copy_buffer}"),
                    ],
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    text=True,
                    preexec_fn=lambda: (cgroup / "cgroup.procs").write_text(str(os.getpid())),
                )
                peak_gib = int((cgroup / "memory.peak").read_text()) / GIB
            found = json.loads(done.stdout)
            wanted = ("status", "total_throughput_tok_s", "bytes_from_disk", "bytes_expected_from_disk", "reason")
            self.keep(
                "small-host",
                f"{self.options.small_host_gib} GiB, copy buffer {copy_buffer}",
                memory_peak_gib=peak_gib,
                **{name: found[name] for name in wanted},
            )

    def _weight_files(self) -> list[Path]:
        model = self.settings("q1-5").opt_model
        return [self.made.path / f"{model.name}-np" / name for name in model.files]

    def _read_all_weights(self) -> None:
        """Both sides find the weights in the page cache, the first run too."""
        with ThreadPoolExecutor(COPY_THREADS) as pool:
            list(pool.map(Path.read_bytes, self._weight_files()))


class NoSampler:
    """Stands in for the samplers where a run is measured without them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def baseline(self) -> None:
        pass

    def start(self, origin_s: float) -> None:
        pass

    def follow(self, pid: int) -> None:
        pass

    def stop(self) -> Samples:
        return Samples()


def plain_read_gb_s(files: Sequence[Path], block_bytes: int) -> float:
    """What the disk gives a reader that does nothing else: whole files by O_DIRECT, as many threads as FlexGen has."""
    files = [file for file in files if file.stat().st_size >= direct_reader.SMALLEST_DIRECT_BYTES]
    requests = [
        direct_reader.Part(str(file), os.O_RDONLY | os.O_DIRECT, offset, length, 0, None)
        for file in files
        for offset, length in direct_reader.cut(0, file.stat().st_size, block_bytes)
    ]

    direct_reader.aligned_buffers(1, direct_reader.ALIGNMENT, pin=False)  # imports torch, which is not measured
    mine = threading.local()

    def read(part: direct_reader.Part) -> None:
        if not hasattr(mine, "buffer"):
            (mine.buffer,) = direct_reader.aligned_buffers(1, block_bytes + direct_reader.ALIGNMENT, pin=False)
        direct_reader.read_part(part, mine.buffer)

    began_s = time.perf_counter()
    with ThreadPoolExecutor(COPY_THREADS) as pool:
        list(pool.map(read, requests))
    return sum(part.length for part in requests) / (time.perf_counter() - began_s) / 1e9


def mapped_read_gb_s(files: Sequence[Path]) -> float:
    """What reading whole files as FlexGen's copy threads do gives: mapped, each copied into its thread's buffer."""
    import numpy
    import torch

    sizes = [file.stat().st_size for file in files]
    mine = threading.local()

    def read(file: Path) -> None:
        if not hasattr(mine, "buffer"):
            mine.buffer = torch.zeros(max(sizes) // 2, dtype=torch.float16)
        mapped = torch.from_numpy(numpy.lib.format.open_memmap(file))
        mine.buffer[: mapped.numel()].view(mapped.shape).copy_(mapped)

    with ThreadPoolExecutor(COPY_THREADS) as pool:
        list(pool.map(read, files[:COPY_THREADS] * 2))  # makes the buffers
        began_s = time.perf_counter()
        list(pool.map(read, files))
        return sum(sizes) / (time.perf_counter() - began_s) / 1e9


@contextmanager
def small_cgroup(limit_bytes: int) -> Iterator[Path]:
    """A cgroup (v2) of so many bytes of memory, empty again afterwards. Raises OSError where this process may not."""
    controllers = CGROUPS / "cgroup.subtree_control"
    if "memory" not in controllers.read_text().split():
        controllers.write_text("+memory")
    folder = CGROUPS / f"small-host-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "memory.max").write_text(str(limit_bytes))
        if (folder / "memory.swap.max").exists():
            (folder / "memory.swap.max").write_text("0")
        yield folder
    finally:
        while (folder / "cgroup.procs").read_text().strip():
            time.sleep(0.1)
        folder.rmdir()


# ---------------------------------------------------------------- tables


@dataclass(frozen=True)
class Spread:
    """The median of some figures, and the least and the most of them."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __format__(self, spec: str) -> str:
        low, high = min(self.values), max(self.values)
        if len(self.values) == 1:
            return format(low, spec)
        return f"{self.median:{spec}} ({low:{spec}} to {high:{spec}})"

    def __str__(self) -> str:
        return f"{self:.4g}"


def ratios(lines: Iterable[dict[str, Any]], field: str, is_ours: Callable[[dict[str, Any]], bool]) -> Spread | None:
    """Ours over the other's, pair by pair; None without a whole pair."""
    pairs: dict[tuple, dict[bool, float]] = {}
    for line in lines:
        pairs.setdefault((line["run"], line["pair"]), {})[is_ours(line)] = line[field]
    found = tuple(pair[True] / pair[False] for pair in pairs.values() if len(pair) == 2)
    return Spread(found) if found else None


def fastest(lines: Iterable[dict[str, Any]]) -> Spread:
    """The fastest of ours over the fastest of stock's, run by run: what others do on a machine only takes from it."""
    runs: dict[str, dict[bool, float]] = {}
    for line in lines:
        of_run, is_ours = runs.setdefault(line["run"], {}), line["who"] == "lab"
        of_run[is_ours] = max(of_run.get(is_ours, 0.0), line["throughput_tok_s"])
    return Spread(tuple(run[True] / run[False] for run in runs.values() if len(run) == 2))


def spread(lines: Iterable[dict[str, Any]], field: str) -> Spread:
    return Spread(tuple(line[field] for line in lines))


def same_tokens(lines: Sequence[dict[str, Any]]) -> bool | None:
    """Whether all runs generated the same; None where a run (a breakdown) tells no tokens. Stock's begin with the
    prompt."""
    ours_ = [line["tokens"] for line in lines if line["who"] == "lab"]
    stocks = [line["tokens"] for line in lines if line["who"] == "stock"]
    if not all(ours_) or not all(stocks):
        return None
    generated = [[row[-len(mine) :] for row, mine in zip(theirs, ours_[0])] for theirs in stocks]
    return all(tokens == ours_[0] for tokens in (*ours_, *generated))


def fidelity_table(lines: list[dict[str, Any]]) -> str:
    rows = []
    for name, of_setting in by_setting(lines).items():
        mine = [line for line in of_setting if line["who"] == "lab"]
        stocks = [line for line in of_setting if line["who"] == "stock"]
        speed = ratios(of_setting, "throughput_tok_s", lambda line: line["who"] == "lab")
        peak = ratios(of_setting, "peak_gpu_mem_gib", lambda line: line["who"] == "lab")
        if not speed or not peak:
            continue
        varies = spread(stocks, "throughput_tok_s").values
        rows.append(
            [
                name,
                of_setting[0].get("page_cache", ""),
                len(speed.values),
                f"{spread(stocks, 'throughput_tok_s'):.4g}",
                f"{spread(mine, 'throughput_tok_s'):.4g}",
                f"{speed:.3f}",
                f"{fastest(of_setting):.3f}",
                f"{100 * (max(varies) / min(varies) - 1):.1f} %" if len(varies) > 1 else "-",
                f"{spread(stocks, 'peak_gpu_mem_gib'):.4f}",
                f"{spread(mine, 'peak_gpu_mem_gib'):.4f}",
                f"{peak:.4f}",
                {True: "the same", False: "DIFFERENT", None: "-"}[same_tokens(of_setting)],
            ]
        )
    return table(
        [
            "run",
            "page cache",
            "pairs",
            "stock token/s",
            "lab token/s",
            "ratio",
            "of the fastest",
            "stock varies by",
            "stock peak GiB",
            "lab peak GiB",
            "ratio",
            "tokens",
        ],
        rows,
    )


def whole_table(lines: list[dict[str, Any]]) -> str:
    """The homework's wall time, as typed and by the lab, where the lab's goes, and the figures of both:
    of the last time that it was measured."""
    typed, records, whole = (
        last_run(line for line in lines if line["who"] == who) for who in ("stock", "lab run", "lab")
    )
    typed_s = sum(line["wall_s"] for line in typed)
    rows: list[list[Any]] = [["stock", f"{len(typed)} commands", typed_s, "", ""]]
    for run in whole:
        as_typed = [line for line in records if line.get("page_cache") != "cold"]
        cold_s = sum(line["wall_s"] for line in records) - sum(line["wall_s"] for line in as_typed)
        for what, of, seconds in (
            ("python -m helpers run q1 q2 q3 q4", records, run["wall_s"]),
            ("- without its cold runs, which are no commands of stock's", as_typed, run["wall_s"] - cold_s),
        ):
            rows.append([what, f"{len(of)} runs", seconds, "", seconds / typed_s if typed else ""])
        for phase, seconds in phases(records, run["wall_s"]).items():
            rows.append([f"- {phase}", "", seconds, seconds / run["wall_s"], ""])
    as_pairs = [
        line | {"who": "lab" if line in records else "stock", "run": "last", "pair": 0}
        for line in (*records, *typed)
        if line["throughput_tok_s"] is not None
    ]
    return table(["what", "of", "wall s", "share", "of stock's"], rows) + "\n\n" + fidelity_table(as_pairs)


def last_run(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of the benchmark's last run that has such."""
    lines = list(lines)
    return [line for line in lines if line["run"] == lines[-1]["run"]]


def phases(records: Iterable[dict[str, Any]], wall_s: float) -> dict[str, float]:
    """Seconds of each phase over all runs; what is around the phases of a run, and around the runs."""
    found: dict[str, float] = {}
    of_runs = 0.0
    for record in records:
        of_runs += record["wall_s"]
        for phase, seconds in record["phases_s"].items():
            found[phase] = found.get(phase, 0.0) + seconds
    found["around a run: weights checked, idle baseline, folders"] = of_runs - sum(found.values())
    found["around the runs: kernels, imports, tables, plots, report"] = wall_s - of_runs
    return found


def direct_table(lines: list[dict[str, Any]]) -> str:
    of = by_setting(lines)
    plain = f"plain O_DIRECT, {direct_reader.PART_BYTES // 2**20} MiB"
    rows = []
    for name, of_setting in of.items():
        rate = spread(of_setting, "read_gb_s")
        speed = spread(of_setting, "throughput_tok_s") if "throughput_tok_s" in of_setting[0] else None
        rows.append(
            [
                name,
                f"{rate:.3f}",
                f"{speed:.3f}" if speed else "",
                f"{speed.median / spread(of['stock reader'], 'throughput_tok_s').median:.2f}" if speed else "",
                f"{rate.median / spread(of[plain], 'read_gb_s').median:.2f}",
            ]
        )
    return table(["reader, page cache cold", "GB/s", "token/s", "of stock's token/s", f"of {plain}"], rows)


def overhead_table(lines: list[dict[str, Any]]) -> str:
    rows = []
    for name, of_setting in by_setting(lines).items():
        ratio = ratios(of_setting, "throughput_tok_s", lambda line: line["sampled"])
        if ratio:
            rows.append(
                [
                    name,
                    len(ratio.values),
                    f"{ratio:.4f}",
                    *(
                        f"{spread([line for line in of_setting if line['sampled'] is on], 'throughput_tok_s'):.4g}"
                        for on in (True, False)
                    ),
                ]
            )
    return table(["run", "pairs", "with samplers / without", "token/s with", "token/s without"], rows)


def page_cache_table(lines: list[dict[str, Any]]) -> str:
    rows = []
    for name, of_setting in by_setting(lines).items():
        pairs = [line for line in lines if line["setting"] in (name, COPIED)]
        ratio = ratios(pairs, "read_gb_s", lambda line, name=name: line["setting"] == name)
        rows.append([name, f"{spread(of_setting, 'read_gb_s'):.3g}", f"{ratio:.3f}" if ratio else ""])
    return table(["weights in the page cache", "GB/s", "of those copied"], rows)


def small_host_table(lines: list[dict[str, Any]]) -> str:
    rows = [
        [
            name,
            line["status"],
            line["total_throughput_tok_s"],
            line["bytes_from_disk"] / line["bytes_expected_from_disk"] if line["bytes_from_disk"] is not None else "",
            line["memory_peak_gib"],
        ]
        for name, of_setting in by_setting(lines).items()
        for line in of_setting[-1:]
    ]
    return table(
        ["100 % disk in a cgroup of", "status", "token/s", "read from disk / needed", "cgroup's memory, peak GiB"], rows
    )


TABLES = {
    "fidelity": fidelity_table,
    "whole": whole_table,
    "direct": direct_table,
    "overhead": overhead_table,
    "page-cache": page_cache_table,
    "small-host": small_host_table,
}


def by_setting(lines: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        found.setdefault(line["setting"], []).append(line)
    return found


def table(header: list[str], rows: list[list[Any]]) -> str:
    def text(value: Any) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(text, line)) + " |" for line in lines)


def report(lines: list[dict[str, Any]]) -> str:
    """Every part that was measured, as Markdown."""
    machines = sorted({f"{line['machine']}, {line['platform']}" for line in lines})
    versions = sorted({", ".join(f"{name} {version}" for name, version in line["versions"].items()) for line in lines})
    texts = [f"{'; '.join(machines)}; {'; '.join(versions)}."]
    for part, make in TABLES.items():
        of_part = [line for line in lines if line["part"] == part]
        if of_part:
            texts.append(f"### {part}\n\n{make(of_part)}")
    return "\n\n".join(texts) + "\n"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=[], choices=PARTS, help="what to measure")
    parser.add_argument("--settings", nargs="*", default=[], metavar="ROW", help="the homework's rows; none: all")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--gen-len", type=int, help="generate another number of tokens than the homework")
    parser.add_argument("--small-host-gib", type=int, default=12)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", default="")
    parser.add_argument("--output", default="against_stock.jsonl", help="measurements, one a line; added to")
    parser.add_argument("--lab-output", type=Path, help="keep what whole-lab writes in this folder")
    parser.add_argument("--offload-root", default=None, help="default: the lab's")
    parser.add_argument("--report", action="store_true", help="print the tables of all measurements in --output")
    options = parser.parse_args(arguments)
    options.output = Path(options.output).resolve()
    if options.parts:
        root = Path(options.offload_root) if options.offload_root else home.home() / "offload"
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="against-stock-", dir=root) as folder:
            bench = Bench(options, Path(folder))
            for part in options.parts:
                getattr(bench, part.replace("-", "_"))()
    if options.report:
        print(report([json.loads(line) for line in options.output.read_text().splitlines()]))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Refused as error:
        sys.exit(f"refused: {error}")
