"""Where figures come from: the block at the top of the report, the line under a plot, and the folded details."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from helpers.analysis import matching
from helpers.analysis.values import capital, in_line, listed, plain, rate
from helpers.errors import Refused
from helpers.machine.emulation import EMULATED_T4
from helpers.machine.profiles import CEILINGS_NAME
from helpers.results import Kind, Machine
from helpers.runs import Run
from helpers.units import KIB

MOST_LINES = 500  # of commands or notes: a browser still opens the page at once

KINDS: dict[Kind, str] = {
    "measured on CUDA": "measured on CUDA. Latencies are FlexGen's own timers, the peak is "
    "`torch.cuda.max_memory_allocated`, without the CUDA context.",
    "measured on the emulated GPU": "emulated. FlexGen's own code ran with a CPU as the GPU; the host link was held to "
    f"{rate(1e9 * EMULATED_T4.h2d_gb_s)} and the disk tier to {rate(1e9 * EMULATED_T4.disk_gb_s)}. Order and ratios "
    "carry over to a real GPU, absolute values don't.",
    "projected by FlexGen": "projected. FlexGen timed a few layer-steps and projected the rest.",
    "predicted": "predicted by a cost model, not measured.",
    "measured by you": "measured by you, as your files report them.",
    "quoted": "quoted from the file, not measured here.",
}


def disk_read_gb_s(folder: Path, runs: Iterable[Run]) -> float | None:
    """The disk's sequential rate that notebook 00 kept next to a result log, if on the machine of these runs."""
    try:
        kept = json.loads((folder / CEILINGS_NAME).read_text(encoding="utf-8"))
        machine, rate_gb_s = Machine.model_validate(kept["machine"]), float(kept["disk_read_gb_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    ours = {(run.machine.name, run.machine.cpu) for run in runs if run.machine}
    return rate_gb_s if ours == {(machine.name, machine.cpu)} else None


def described(figures: Path) -> dict[str, str]:
    """Lines of NAME.json, next to someone's NAME.csv, on their machine, such as {"GPU": "Tesla T4, 14,912 MB"}.

    Raises Refused if it is something else.
    """
    path = figures.with_suffix(".json")
    if figures.suffix.lower() != ".csv" or not path.is_file():
        return {}
    try:
        lines = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"{path}: not readable JSON ({error})") from error
    if not isinstance(lines, dict) or not all(isinstance(text, str) for text in lines.values()):
        raise Refused(f'{path}: not an object of texts such as {{"GPU": "Tesla T4, 14,912 MB"}}')
    return lines


def block(runs: Sequence[Run], sequential_gb_s: float | None = None, machine: Mapping[str, str] | None = None) -> str:
    """The machine, its disk, the versions, the date and the kind of figures, a line each (Markdown).

    `machine` has lines from someone who quotes their figures; they replace the lab's own of the same name.
    """
    if not runs:
        return "These figures hold no runs."
    lines = dict(_machine_lines(runs[0].machine, runs[0])) | {"Disk": _disk(runs, sequential_gb_s)}
    for name, key in (("Python", "python"), ("PyTorch", "torch"), ("FlexGen", "flexgen")):
        if versions := _distinct(run.versions.get(key, "") for run in runs):
            lines[name] = listed(versions)
    if days := _days(runs):
        lines["Date"] = " to ".join(days)
    lines = {in_line(name): in_line(text) for name, text in (machine or {}).items()} | {
        name: text for name, text in lines.items() if name not in (machine or {})
    }
    lines["Runs"] = workload(runs)
    kinds = [KINDS[kind] for kind in dict.fromkeys(run.kind for run in runs)]
    return "\n".join([f"- {name}: {text}" for name, text in lines.items()] + [f"- Figures: {kind}" for kind in kinds])


def _machine_lines(machine: Machine | None, run: Run) -> list[tuple[str, str]]:
    memory = machine.gpu_mem_gib if machine else run.gpu_mem_gib
    size = f"{plain(memory)} GiB" if memory is not None else "memory not stated"
    if machine is None:
        return [("Source", in_line(run.source)), ("GPU", f"not stated; {size}" if memory else "not stated")]
    gpu = (
        f"none, emulated ({in_line(machine.profile)}, {size})"
        if machine.profile
        else f"{in_line(machine.name)}, {size}"
    )
    lines = [("GPU", gpu)]
    if machine.cpu:
        lines.append(("CPU", f"{in_line(machine.cpu)}, {machine.cpu_count} cores"))
    if machine.ram_gib is not None:
        lines.append(("CPU RAM", f"{plain(machine.ram_gib)} GiB"))
    return lines


def _disk(runs: Sequence[Run], sequential_gb_s: float | None) -> str:
    """The disk and its sequential rate, or the highest that was sampled during the runs."""
    name = listed(_distinct(run.disk.device for run in runs if run.disk))
    sampled = max((run.disk_rkb_s_peak for run in runs if run.disk_rkb_s_peak), default=None)
    stated = next((run.machine.disk_read_gb_s for run in runs if run.machine and run.machine.disk_read_gb_s), None)
    if stated:
        speed = f"{rate(1e9 * stated)} sequential (stated by you)"
    elif sequential_gb_s:
        speed = f"{rate(1e9 * sequential_gb_s)} sequential (measured)"
    elif sampled:
        speed = f"{rate(KIB * sampled)} at most (sampled during the runs)"
    else:
        speed = "rate not measured"
    return f"{name}, {speed}" if name else speed


def workload(runs: Sequence[Run]) -> str:
    """Model, lengths, batch, page cache and options of runs, in one line."""
    first, work = runs[0], runs[0].workload
    words = [f"{in_line(first.model)}, {work.prompt_len} + {work.gen_len} tokens"]
    if len({run.workload.gpu_batch_size for run in runs}) == 1:
        words.append(f"batch {work.gpu_batch_size}")
    if work.num_gpu_batches > 1:
        words.append(f"{work.num_gpu_batches} micro-batches")
    if caches := _distinct(run.page_cache or "" for run in runs):
        words.append(f"page cache {' and '.join(sorted(caches, reverse=True))}")
    if first.other_options:
        words.append(in_line(first.other_options))
    if any(run.repeats and run.repeats > 1 for run in runs):
        words.append("medians (range) of repeats")
    return ", ".join(words)


def provenance(runs: Sequence[Run]) -> str:
    """Kind and source of figures and their workload, in one line for a plot or a table that stands alone."""
    if not runs:
        return "Its runs are not in the figures."
    sources = dict.fromkeys(f"{run.kind}: {in_line(run.source)}" for run in runs)
    return f"{capital(', '.join(sources))}; {workload(runs)}."


def details(runs: Sequence[Run]) -> str:
    """Every machine, all versions, each command and each note (Markdown)."""
    blocks = []
    machines = {run.machine.model_dump_json(): run.machine for run in runs if run.machine}
    for machine in machines.values():
        lines = "; ".join(text for _, text in _machine_lines(machine, runs[0]))
        platform = f"; {in_line(machine.platform)}" if machine.platform else ""
        blocks.append(f"Machine: {lines}{platform}.")
    versions = dict.fromkeys(tuple(sorted(run.versions.items())) for run in runs if run.versions)
    blocks += ["Versions: " + ", ".join(f"{in_line(a)} {in_line(b)}" for a, b in found) + "." for found in versions]
    names = matching.names(runs)
    commands = [f"{name}: {run.command}" for name, run in zip(names, runs) if run.command]
    if commands:
        blocks.append("Commands:\n\n" + _some(["    " + " ".join(command.split()) for command in commands]))
    places = [f"- {in_line(name)}: {in_line('; '.join(run.sources))}" for name, run in zip(names, runs) if run.sources]
    if places:
        blocks.append("Files and lines behind each run's figures:\n\n" + _some(places))
    notes = [f"- {in_line(name)}: {in_line(note)}" for name, run in zip(names, runs) for note in run.notes]
    if notes:
        blocks.append("Notes:\n\n" + _some(notes))
    return "\n\n".join(blocks)


def remarks(runs: Sequence[Run]) -> str:
    """Suspicious figures from files, and assumptions made about them (Markdown); "" if there are none."""
    lines = [
        f"- {in_line(name)}: {in_line(remark)}"
        for name, run in zip(matching.names(runs), runs)
        for remark in run.remarks
    ]
    assumed = sorted({name for run in runs for name in run.assumed} - {"page_cache"})
    if assumed:
        lines.append(f"- not stated, so taken to be the homework's: {', '.join(assumed)}")
    return "Check these figures first:\n\n" + _some(lines) if lines else ""


def _distinct(texts: Iterable[str]) -> list[str]:
    return [in_line(text) for text in dict.fromkeys(texts) if text]


def _days(runs: Iterable[Run]) -> list[str]:
    days = sorted(_distinct(run.started_at[:10] for run in runs))
    return list(dict.fromkeys((days[0], days[-1]))) if days else []


def _some(lines: Sequence[str]) -> str:
    more = f"\n\n... and {len(lines) - MOST_LINES:,} more." if len(lines) > MOST_LINES else ""
    return "\n".join(lines[:MOST_LINES]) + more
