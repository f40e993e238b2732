"""Notebook 06: from FlexGen's 100 % disk run to the fastest one, rung by rung, each next to its bound.

Compares only figures of the same machine and workload. Rungs that would take too long are predicted and marked so.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from helpers import forecast, homework, paths
from helpers.analysis.values import memory, plain
from helpers.errors import Refused
from helpers.home import home
from helpers.homework import FASTER
from helpers.machine import limits
from helpers.machine.profiles import MachineProfile
from helpers.notebook import Page
from helpers.placement import place
from helpers.predict import search, time_model
from helpers.predict.host_memory import host_memory
from helpers.predict.memory_check import PROCESS_BYTES
from helpers.predict.time_model import Prediction
from helpers.report import plots
from helpers.report.columns import Column, Table, build
from helpers.results import RunRecord, Sweep
from helpers.settings import OffloadSplit, RunSettings

CPU_SHARES = range(100, 0, -10)
SPARE_BYTES = 2**29  # host memory left free when choosing the CPU share
PREDICTED_WHERE_EMULATED = ("faster-fit", "faster-direct", "faster-direct-4bit", "faster-search")
PEER_SPLITS = {"gpu": "all GPU", "cpu": "all CPU", "disk": "all disk", "half-cpu": "half CPU", "half-disk": "half disk"}
LABELS = {row.id: row.label for row in FASTER} | {"faster-search": "the best that search finds"}


@dataclass(frozen=True)
class Rung:
    """One setting: measured (`record`), or only predicted. `first_tokens` are those of the first rung."""

    id: str
    settings: RunSettings
    record: RunRecord | None
    predicted: Prediction | None
    profile: MachineProfile | None
    first_tokens: tuple[tuple[int, ...], ...] = ()

    @property
    def label(self) -> str:
        label = LABELS[self.id]
        share = self.settings.split.weights_cpu
        if self.id in ("faster-cpu", "faster-b16") and share < 100:
            label += f" ({share} % of the weights on the CPU)"
        return label

    @property
    def measured(self) -> bool:
        return self.record is not None and self.record.status == "done"

    @property
    def kind(self) -> str:
        if self.record is None:
            return "predicted" if self.predicted else "neither measured nor predicted"
        return self.record.kind if self.measured else f"failed: {self.record.failure and self.record.failure.message}"

    @property
    def throughput_tok_s(self) -> float | None:
        if self.record is not None:
            return self.record.total_throughput_tok_s if self.measured else None
        return self.predicted.total_throughput_tok_s if self.predicted else None

    @property
    def peak_gpu_mem_gib(self) -> float | None:
        if self.record is not None:
            return self.record.peak_gpu_mem_gib if self.measured else None
        return self.predicted.peak_gpu_mem_gib if self.predicted else None

    @property
    def gb_from_disk_per_pass(self) -> float | None:
        """GB actually read from disk per pass, if measured; the emulated disk has no counter."""
        if self.record is None or not self.measured or self.record.bytes_from_disk is None:
            return None
        if self.settings.device == "emulated":
            return None
        return self.record.bytes_from_disk / 1e9 / self.settings.workload.gen_len

    @property
    def gb_over_pcie_per_pass(self) -> float:
        split = self.settings.split
        placed = place(self.settings.opt_model, split.weights_gpu, split.weights_cpu, self.settings.compress_weight)
        return (placed.total_bytes - placed.bytes_by_tier["gpu"]) / 1e9

    @property
    def bound(self) -> tuple[str, float] | None:
        """The bottleneck, and the throughput if nothing else took time.

        It is the time model's longest term; the disk's term uses measured bytes where there are any.
        """
        if self.predicted is None or self.profile is None:
            return None
        terms = dict(self.predicted.terms_s)
        from_disk = self.gb_from_disk_per_pass
        if from_disk is not None:
            terms["disk"] = from_disk * self.settings.workload.gen_len / self.profile.disk_gb_s
        term = max(terms, key=lambda name: terms[name])
        return term, self.settings.workload.generated_tokens / terms[term]

    @property
    def same_tokens(self) -> bool | None:
        """Whether it generated the same tokens as the first rung; all sequences share one prompt."""
        if self.record is None or not self.record.generated_tokens or not self.first_tokens:
            return None
        count = min(len(self.first_tokens), len(self.record.generated_tokens))
        return self.record.generated_tokens[:count] == self.first_tokens[:count]


def plan(runs: Mapping[str, RunSettings], profile: MachineProfile | None) -> dict[str, RunSettings]:
    """The rungs for this machine, with as many weights on the CPU as fit, and last the setting that `search` finds."""
    rungs = dict(runs)
    allowance = limits.memory_allowance()
    for name in ("faster-cpu", "faster-b16"):
        if rungs[name].device == "cuda":
            rungs[name] = _with_cpu_share(rungs[name], allowance.free_bytes)
    if profile is not None:
        first = next(iter(runs.values()))
        work = first.workload
        try:
            best = search.best(first.model, profile, work.prompt_len, work.gen_len).best.settings
        except Refused:  # nothing fits, or a model that search doesn't know
            return rungs
        shared = {"device": first.device, "page_cache": first.page_cache, "repeats": first.repeats}
        rungs["faster-search"] = best.model_copy(update=shared)
    return rungs


def _with_cpu_share(run: RunSettings, free_bytes: int) -> RunSettings:
    """Put as many weights on the CPU as fit, and read the rest with the direct reader."""
    for share in CPU_SHARES:
        split = OffloadSplit.parse(f"0 {share} 100 0 100 0")
        reader = "stock" if share == 100 else "direct"
        candidate = run.model_copy(update={"split": split, "disk_reader": reader})
        if host_memory(candidate).total_bytes + PROCESS_BYTES + SPARE_BYTES <= free_bytes:
            return candidate
    return run.model_copy(update={"split": OffloadSplit.parse(homework.DISK), "disk_reader": "direct"})


def worth_measuring(rungs: Mapping[str, RunSettings], output: Path, longest_run_s: float) -> dict[str, RunSettings]:
    """The rungs forecast to take at most `longest_run_s`, and those that can't be forecast.

    Some rungs are always predicted on the emulated GPU: its disk's pace doesn't depend on the reader, and the large
    batch that `search` finds would be slow on a CPU core.
    """
    if not isinstance(longest_run_s, int | float) or not longest_run_s > 0:
        raise Refused(f"longest_run_s {longest_run_s!r}: not a number of seconds above 0")
    worth = {}
    for name, run in rungs.items():
        seconds = forecast.of({name: run}, output).seconds or 0.0
        if seconds <= longest_run_s and not (run.device == "emulated" and name in PREDICTED_WHERE_EMULATED):
            worth[name] = run
    return worth


def climb(page: Page, longest_run_s: float) -> tuple[Rung, ...]:
    """Measure the rungs that are quick enough and predict the others."""
    rungs = plan(page.settings(FASTER), page.profile)
    return compared(rungs, page.measure(worth_measuring(rungs, page.output, longest_run_s)), page.profile)


def compared(rungs: Mapping[str, RunSettings], sweep: Sweep, profile: MachineProfile | None) -> tuple[Rung, ...]:
    """Each rung with its measurement, if there is one, and its prediction, if this machine is known."""
    first = sweep.records.get(next(iter(rungs)))
    tokens = first.generated_tokens if first else ()
    predicted = {name: time_model.predict(run, profile) for name, run in rungs.items()} if profile else {}
    return tuple(
        Rung(name, run, sweep.records.get(name), predicted.get(name), profile, tokens) for name, run in rungs.items()
    )


# ---- output ---------------------------------------------------------------------------------------------------------


def table(rungs: Sequence[Rung]) -> Table:
    """The ladder: throughput, speed-up over the first rung, bytes, bound, memory and tokens."""
    first = rungs[0].throughput_tok_s

    def times_the_first(rung: Rung) -> float | None:
        return rung.throughput_tok_s / first if rung.throughput_tok_s and first else None

    listed: tuple[Column[Rung], ...] = (
        Column("", "rung", lambda rung: rung.id),
        Column("Rung", "label", lambda rung: rung.label),
        Column("", "percent", lambda rung: rung.settings.split),
        Column("", "batch", lambda rung: rung.settings.workload.effective_batch),
        Column("token/s", "total_throughput_tok_s", lambda rung: rung.throughput_tok_s, plain),
        Column("Times the first", "times_the_first", times_the_first, lambda factor: f"{plain(factor)}x"),
        Column("From disk (GB/pass)", "gb_from_disk_per_pass", lambda rung: rung.gb_from_disk_per_pass, plain),
        Column("Over PCIe (GB/pass)", "gb_over_pcie_per_pass", lambda rung: rung.gb_over_pcie_per_pass, plain),
        Column("", "bound", lambda rung: rung.bound and rung.bound[0]),
        Column("", "bound_tok_s", lambda rung: rung.bound and rung.bound[1]),
        Column("Bound by (token/s)", "", lambda rung: rung.bound, lambda bound: f"{bound[0]} ({plain(bound[1])})"),
        Column("Peak GPU mem", "peak_gpu_mem_gib", lambda rung: rung.peak_gpu_mem_gib, memory),
        Column("Tokens", "same_tokens", lambda rung: rung.same_tokens, lambda same: "same" if same else "differ"),
        Column("Kind", "kind", lambda rung: rung.kind),
    )
    run = rungs[0].settings
    caption = (
        f"{run.opt_model.name} from the disk, faster. Prompt {run.workload.prompt_len}, generated "
        f"{run.workload.gen_len}, batch {run.workload.effective_batch} unless the rung says otherwise."
    )
    return build("faster", caption, listed, rungs)


def plot(rungs: Sequence[Rung]) -> plots.Plot:
    """Throughput of each rung as a bar, measured full and predicted hollow, with its bound as a line."""
    known = [rung for rung in rungs if rung.throughput_tok_s]
    figure = Figure(figsize=(9, 1.2 + 0.5 * len(known)), layout="constrained")
    axes = figure.subplots()
    for place_y, rung in enumerate(known):
        speed = rung.throughput_tok_s or 0.0
        measured = rung.record is not None
        colour = plots.BLUE if rung.same_tokens is not False else plots.ORANGE
        axes.barh(place_y, speed, height=0.6, color=colour if measured else "white", edgecolor=colour, linewidth=1.5)
        end = max(speed, rung.bound[1]) if rung.bound and measured else speed
        axes.annotate(
            f"{speed:.3g}{'' if measured else ' (predicted)'}",
            (end, place_y),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
        if rung.bound and measured:
            axes.plot([rung.bound[1]] * 2, [place_y - 0.36, place_y + 0.36], color=plots.VERMILION, linewidth=2.5)
    axes.set_yticks(range(len(known)), [rung.label for rung in known])
    axes.invert_yaxis()
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(low / 1.5, high * 3)
    axes.set_xlabel("Total throughput (token/s, log scale). Red: what bounds the rung. Orange: other tokens (4-bit).")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("From the disk, faster", fontweight="bold", loc="left")
    said = "; ".join(f"{rung.label} {rung.throughput_tok_s:.3g} ({rung.kind})" for rung in known)
    return plots.Plot("faster", f"Throughput by rung in token/s: {said}.", figure, drawn=bool(known))


def gain_on_disk(rungs: Sequence[Rung]) -> float | None:
    """Best speed-up over the first rung with all weights still on disk and the same tokens."""
    best, first = _best(rungs, on_disk=True), rungs[0].throughput_tok_s
    return best.throughput_tok_s / first if best and best.throughput_tok_s and first and rungs[0].measured else None


def _best(rungs: Sequence[Rung], on_disk: bool) -> Rung | None:
    """The fastest measured rung with the first one's tokens: with its split if `on_disk`, else with another."""
    kept = [rung for rung in rungs if rung.measured and rung.same_tokens and rung.throughput_tok_s]
    kept = [rung for rung in kept if (rung.settings.split == rungs[0].settings.split) == on_disk]
    return max(kept, key=lambda rung: rung.throughput_tok_s or 0, default=None)


def verdict(rungs: Sequence[Rung]) -> str:
    """The answer in Markdown: the speed-up with the same tokens, and what bounds it."""
    first, gain, best, top = rungs[0].throughput_tok_s, gain_on_disk(rungs), _best(rungs, True), _best(rungs, False)
    if not first or gain is None or best is None:
        return "**Can't tell:** the first rung has no measured figure and tokens to compare with."
    lines = [
        f"**{gain:.2g} times as fast with the same tokens and all weights still on disk:** "
        f"{best.throughput_tok_s:.3g} against {first:.3g} token/s ({best.label})."
        if gain > 1.05
        else f"**No faster here** with the same tokens and all weights still on disk: {first:.3g} token/s as it is."
    ]
    if best.bound:
        lines.append(f"Its bound is {best.bound[0]}, which alone would allow {best.bound[1]:.3g} token/s.")
    if top and top.throughput_tok_s:
        faster = top.throughput_tok_s / first
        lines.append(f"Off the disk: {top.throughput_tok_s:.3g} token/s, {faster:.2g} times ({top.label}).")
    if rungs[0].settings.device == "emulated":
        lines.append(
            "The emulated disk has no page cache and keeps its pace however it is read, so fitted buffers and the "
            "direct reader gain nothing here. On a real machine they are the two that count."
        )
    return " ".join(lines)


# ---- peers ----------------------------------------------------------------------------------------------------------


def peers(run: RunSettings, output: Path) -> Table | str:
    """accelerate on the same work, measured once per machine and kept in `peers.jsonl`; or why there is no figure."""
    if run.device != "cuda":
        return "accelerate is compared on a GPU only: the emulated one is FlexGen's."
    if importlib.util.find_spec("accelerate") is None:
        return "accelerate is not installed here: `pip install accelerate`, then run this cell again."
    work, log = run.workload, output / "peers.jsonl"
    wanted = {"model": run.model, "prompt_len": work.prompt_len, "gen_len": work.gen_len, "batch": work.gpu_batch_size}
    known = _peer_lines(log, wanted)
    if missing := [split for split in PEER_SPLITS if split not in known]:
        flags = [word for name, value in wanted.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        script = paths.ROOT / "benchmarks" / "peers.py"
        command = [sys.executable, str(script), *flags, "--folder", str(home()), "--output", str(log)]
        subprocess.run([*command, "--splits", *missing], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        known = _peer_lines(log, wanted)
    listed: tuple[Column[dict[str, Any]], ...] = (
        Column("Split", "split", lambda line: PEER_SPLITS[line["split"]]),
        Column("token/s", "total_throughput_tok_s", lambda line: line.get("total_throughput_tok_s"), plain),
        Column("Peak GPU mem", "peak_gpu_mem_gib", lambda line: line.get("peak_gpu_mem_gib"), memory),
        Column("Kind", "kind", lambda line: f"measured on {line['machine']}" if "machine" in line else "failed"),
        Column("Reason", "reason", lambda line: line.get("failure"), show="if any"),
    )
    caption = "accelerate on the same work, random weights; page cache as it comes."
    return build("peers", caption, listed, [known[split] for split in PEER_SPLITS if split in known])


def _peer_lines(log: Path, wanted: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The last line of each split for this work."""
    if not log.is_file():
        return {}
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
    return {line["split"]: line for line in lines if wanted.items() <= line.items()}
