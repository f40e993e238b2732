"""Page cache near its limit: OPT-1.3B with every weight on disk, in memory cgroups of 10 to 16 GiB. Needs root.

    python benchmarks/page_cache_limit.py --seconds 540 --output limit.jsonl                          # unlimited disk
    python benchmarks/page_cache_limit.py --seconds 540 --output limit.jsonl --disk-mb-s 252 --limits-gib 11 11.2 11.5
    python benchmarks/page_cache_limit.py --smoke --output smoke.jsonl                                # no GPU, 1 minute
    python benchmarks/page_cache_limit.py --report limit.jsonl

Each limit is run twice in one cgroup, since history may decide: after dropping the page cache, and again with the page
cache as the first run left it. Every run is a line of `--output` as soon as it ends, and the same command later goes on
with the limits that are missing. No run starts that would end after `--seconds`; a run that gets there is killed.

A line has the cgroup's memory.stat before and after, and for each pass its seconds, the bytes that the disk delivered,
refaults and activations (a refaulting page that goes to the active list at once), and the sizes of the file lists. On
the H200 machine a run takes about 40 s with its own disk, and 2 to 3 minutes with 252 MB/s.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from helpers import lab  # noqa: E402
from helpers.engine.page_cache import drop  # noqa: E402
from helpers.machine import disks  # noqa: E402
from helpers.settings import OffloadSplit, RunSettings, Workload  # noqa: E402
from helpers.weights import store  # noqa: E402

GIB = 2**30
CGROUPS = Path("/sys/fs/cgroup")
MGLRU = Path("/sys/kernel/mm/lru_gen/enabled")
LIMITS_GIB = (11.2, 11.0, 11.5, 12.0, 10.5, 11.75, 12.5, 10.0, 11.35, 13.0, 14.0, 16.0)
HISTORIES = ("dropped", "kept")
SAMPLE_S = 0.1
FIRST_RUN_S = 75.0  # assumed to take, before one has been timed
STATISTICS = (
    "anon",
    "file",
    "rss",
    "cache",
    "mapped_file",
    "file_mapped",
    "kernel",
    "active_file",
    "inactive_file",
    "active_anon",
    "inactive_anon",
    "unevictable",
    "workingset_refault_file",
    "workingset_activate_file",
    "workingset_restore_file",
    "pgscan",
    "pgsteal",
    "pgactivate",
    "pgdeactivate",
)
PAGES = ("workingset", "pg")  # counters of pages; all else is bytes


@dataclass(frozen=True)
class Cgroup:
    """A memory cgroup (v2 or v1), and where its processes' disk reads are limited."""

    version: str
    memory: Path
    disk: Path

    def limit_memory(self, limit_bytes: int) -> None:
        name = {"v2": "memory.max", "v1": "memory.limit_in_bytes"}[self.version]
        (self.memory / name).write_text(str(limit_bytes))

    def limit_disk(self, device: str, bytes_per_s: int) -> None:
        number = device_number(device)
        if self.version == "v2":
            (self.disk / "io.max").write_text(f"{number} rbps={bytes_per_s}")
        else:
            (self.disk / "blkio.throttle.read_bps_device").write_text(f"{number} {bytes_per_s}")

    def enter(self) -> None:
        for folder in {self.memory, self.disk}:
            (folder / "cgroup.procs").write_text(str(os.getpid()))

    def statistics(self) -> dict[str, int]:
        lines = (line.split() for line in (self.memory / "memory.stat").read_text().splitlines())
        return {name: int(value) for name, value in lines if name in STATISTICS}

    def bytes_read(self, device: str) -> int:
        """Bytes that the cgroup's processes have read from a disk."""
        number = device_number(device)
        if self.version == "v2":
            found = re.search(rf"^{number} .*?rbytes=(\d+)", (self.disk / "io.stat").read_text(), re.MULTILINE)
        else:
            counted = (self.disk / "blkio.throttle.io_service_bytes").read_text()
            found = re.search(rf"^{number} Read (\d+)", counted, re.MULTILINE)
        return int(found[1]) if found else 0

    def peak_gib(self) -> float | None:
        name = {"v2": "memory.peak", "v1": "memory.max_usage_in_bytes"}[self.version]
        with suppress(OSError):
            return int((self.memory / name).read_text()) / GIB
        return None

    def processes(self) -> list[int]:
        return [int(line) for line in (self.memory / "cgroup.procs").read_text().split()]


def device_number(device: str) -> str:
    """The number of the whole disk, which cgroups limit and count, of a disk or partition."""
    folder = (Path("/sys/class/block") / device).resolve()
    return ((folder.parent if (folder / "partition").exists() else folder) / "dev").read_text().strip()


@contextmanager
def cgroup() -> Iterator[Cgroup]:
    """A cgroup of this script's own; whatever still runs in it at the end is killed."""
    name = f"page-cache-limit-{os.getpid()}"
    if (CGROUPS / "cgroup.controllers").exists():
        with suppress(OSError):  # enabled already, or by a manager that doesn't let others
            (CGROUPS / "cgroup.subtree_control").write_text("+memory +io")
        made = Cgroup("v2", CGROUPS / name, CGROUPS / name)
    else:
        made = Cgroup("v1", CGROUPS / "memory" / name, CGROUPS / "blkio" / name)
    folders = sorted({made.memory, made.disk})
    for folder in folders:
        folder.mkdir()
    try:
        yield made
    finally:
        while left := made.processes():
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.1)
        for folder in folders:
            folder.rmdir()


class Sampler:
    """The cgroup's statistics and the disk's counter over time, on time.monotonic's clock."""

    def __init__(self, group: Cgroup, device: str) -> None:
        self.group, self.device = group, device
        self.rows: list[tuple[float, dict[str, int]]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.is_set():
            row = self.group.statistics() | {"disk_bytes": self.group.bytes_read(self.device)}
            self.rows.append((time.monotonic(), row))
            self._stop.wait(SAMPLE_S)

    def at(self, moment: float) -> dict[str, float]:
        """The statistics at a moment, interpolated."""
        after = next((i for i, (time_s, _) in enumerate(self.rows) if time_s >= moment), len(self.rows) - 1)
        (start, before), (end, then) = self.rows[max(after - 1, 0)], self.rows[after]
        share = min(max((moment - start) / (end - start), 0.0), 1.0) if end > start else 1.0
        return {name: value + share * (then[name] - value) for name, value in before.items() if name in then}


def passes(sampler: Sampler, latencies_s: Sequence[float], started: float) -> list[dict[str, float]]:
    """What each forward pass took from the disk, what refaulted, and the file lists at its end."""
    rows = []
    for seconds in latencies_s:
        before, after = sampler.at(started), sampler.at(started + seconds)
        row = {"seconds": seconds, "disk_bytes": after["disk_bytes"] - before["disk_bytes"]}
        for name in after:
            if name.startswith(PAGES):
                row[name] = after[name] - before[name]
            elif name in ("active_file", "inactive_file"):
                row[f"{name}_at_end"] = after[name]
        rows.append({name: round(value, 4) for name, value in row.items()})
        started += seconds
    return rows


def measure_inside(settings_json: str, folder: str) -> None:
    """The lab's own run, in this process's cgroup; tells on stdout when each phase began, and the record."""
    settings = RunSettings.model_validate_json(settings_json)

    def tell(phase: str) -> None:
        print(json.dumps({"phase": phase, "moment": time.monotonic()}), flush=True)

    sweep = lab.run(settings, folder, fresh=True, say=lambda text: None, on_phase=tell)
    (record,) = sweep.records.values()
    print(json.dumps({"record": record.model_dump_json()}), flush=True)


def run_once(group: Cgroup, settings: RunSettings, device: str, folder: Path, left_s: float) -> dict[str, Any]:
    """One run in the cgroup, killed after `left_s`."""
    began = time.monotonic()
    command = [sys.executable, __file__, "--inside", settings.model_dump_json(), str(folder)]
    with Sampler(group, device) as sampler:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=group.enter, cwd=ROOT)
        ending = threading.Timer(left_s, child.kill)
        ending.start()
        told = [json.loads(line) for line in child.stdout or ()]
        child.wait()
        ending.cancel()
    line: dict[str, Any] = {
        "wall_s": round(time.monotonic() - began, 1),
        "memory_peak_gib": group.peak_gib(),
        "memory_stat_at_end": group.statistics(),
    }
    record = next((json.loads(one["record"]) for one in told if "record" in one), None)
    if record is None or record["failure"]:
        return line | {"status": "failed", "reason": record["failure"]["message"] if record else "killed or crashed"}
    (repeat,) = record["repeats"]
    measured = next(one["moment"] for one in told if one.get("phase", "").endswith(": measured"))
    each = passes(sampler, repeat["pass_latencies_s"], measured)
    return line | {
        "status": "done",
        "gpu": record["machine"]["name"],
        "total_throughput_tok_s": settings.workload.generated_tokens / sum(repeat["pass_latencies_s"]),
        "bytes_from_disk": sum(one["disk_bytes"] for one in each),
        "bytes_expected_from_disk": record["bytes_expected_from_disk"],
        "memory_stat_before": {name: round(value) for name, value in sampler.at(measured).items()},
        "passes": each,
    }


def drop_page_cache(files: Sequence[Path]) -> None:
    """Forget the weights, and everything else that the kernel lets us: libraries are then charged to the cgroup too."""
    for file in files:
        drop(str(file))
    os.sync()
    with suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1")


def measure(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    ends = time.monotonic() + options.seconds
    model = options.model or ("opt-mini" if options.smoke else "opt-1.3b")
    settings = RunSettings(
        model=model,
        split=OffloadSplit.parse(options.percent),
        workload=Workload(prompt_len=32 if options.smoke else 128, gen_len=options.gen_len),
        device="emulated" if options.smoke else lab.choose_device("cuda"),
        copy_buffer=options.copy_buffer,
        repeats=1,
    )
    made = store.prepare(model, say)
    files = [made.path / f"{settings.opt_model.name}-np" / name for name in settings.opt_model.files]
    device = disks.disk_of(files[0]).device
    if device is None:
        raise SystemExit(f"{files[0]}: no disk whose reads can be counted")
    for disk_mb_s in options.disk_mb_s:
        run_s = FIRST_RUN_S
        for limit_gib in options.limits_gib or ((3.0,) if options.smoke else LIMITS_GIB):
            what = {
                "limit_gib": limit_gib,
                "disk_mb_s": disk_mb_s,
                "model": model,
                "device": settings.device,
                "percent": options.percent,
                "copy_buffer": options.copy_buffer,
                "gen_len": options.gen_len,
            }
            if what in known(options.output):
                continue
            drop_page_cache(files)
            with cgroup() as group, tempfile.TemporaryDirectory() as folder:
                group.limit_memory(int(limit_gib * GIB))
                if disk_mb_s:
                    group.limit_disk(device, int(disk_mb_s * 1e6))
                for history in HISTORIES:
                    left_s = ends - time.monotonic()
                    if left_s < run_s:
                        say(f"{left_s:.0f} s left: too few for the next run; the same command goes on later")
                        return
                    line = what | {
                        "history": history,
                        "kernel": os.uname().release,
                        "mglru": MGLRU.read_text().strip() if MGLRU.exists() else None,
                        "cgroup": group.version,
                    }
                    line |= run_once(group, settings, device, Path(folder), left_s)
                    run_s = 1.1 * line["wall_s"]
                    with open(options.output, "a", encoding="utf-8") as log:
                        log.write(json.dumps(line) + "\n")
                    say(in_words(line))


def known(output: Path) -> list[dict[str, Any]]:
    """What has been run to the end: with the page cache dropped, and kept."""
    fields = ("limit_gib", "disk_mb_s", "model", "device", "percent", "copy_buffer", "gen_len")
    done = (line for line in lines_of(output) if line["status"] == "done" and line["history"] == HISTORIES[-1])
    return [{field: line[field] for field in fields} for line in done]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def in_words(line: dict[str, Any]) -> str:
    disk = f"{line['disk_mb_s']:g} MB/s" if line["disk_mb_s"] else "unlimited disk"
    what = f"{line['limit_gib']:g} GiB, {disk}, page cache {line['history']}"
    if line["status"] != "done":
        return f"{what}: {line['reason']}"
    needed = line["bytes_expected_from_disk"] / line["gen_len"]
    shares = " ".join(f"{one['disk_bytes'] / needed:.2f}" for one in line["passes"])
    return f"{what}: {line['total_throughput_tok_s']:.3g} token/s, share from disk by pass: {shares}"


def report(path: Path) -> str:
    """A table: the share that came from the disk, of all passes and of the last half of them."""
    rows = [
        "| limit (GiB) | disk | page cache | token/s | from disk | later passes | active / inactive file (GiB) |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in sorted(lines_of(path), key=lambda line: (line["disk_mb_s"], line["limit_gib"], line["history"])):
        disk = f"{line['disk_mb_s']:g} MB/s" if line["disk_mb_s"] else "unlimited"
        start = f"| {line['limit_gib']:g} | {disk} | {line['history']} |"
        if line["status"] != "done":
            rows.append(f"{start} {line['reason']} | | | |")
            continue
        needed = line["bytes_expected_from_disk"] / line["gen_len"]
        shares = [one["disk_bytes"] / needed for one in line["passes"]]
        last = line["passes"][-1]
        lists = " / ".join(f"{last[f'{name}_file_at_end'] / GIB:.2f}" for name in ("active", "inactive"))
        rows.append(
            f"{start} {line['total_throughput_tok_s']:.3g} | {statistics.fmean(shares):.0%} "
            f"| {statistics.fmean(shares[len(shares) // 2 :]):.0%} | {lists} |"
        )
    return "\n".join(rows)


def main() -> None:
    if sys.argv[1:2] == ["--inside"]:
        measure_inside(*sys.argv[2:4])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("page_cache_limit.jsonl"))
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--limits-gib", type=float, nargs="+")
    parser.add_argument("--disk-mb-s", type=float, nargs="+", default=(0.0,), help="0: as fast as it is")
    parser.add_argument("--gen-len", type=int, default=8)
    parser.add_argument("--copy-buffer", choices=("stock", "fit"), default="stock")
    parser.add_argument("--model", help="opt-1.3b, or opt-mini with --smoke")
    parser.add_argument("--percent", default="0 0 100 0 100 0")
    parser.add_argument("--smoke", action="store_true", help="the emulated GPU, one limit of 3 GiB")
    parser.add_argument("--report", type=Path, metavar="JSONL", help="print the table of these runs")
    options = parser.parse_args()
    if options.report:
        print(report(options.report))
        return
    measure(options, lambda text: print(text, file=sys.stderr, flush=True))


if __name__ == "__main__":
    main()
