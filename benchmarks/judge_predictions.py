"""Predictions judged against measured and published runs.

    python benchmarks/judge_predictions.py                                     # a table of all kept references
    python benchmarks/judge_predictions.py --runs                              # each of their runs, too
    python benchmarks/judge_predictions.py PROFILE.json RESULTS.jsonl...       # your own machine's
    python benchmarks/judge_predictions.py --emulated RESULTS.jsonl            # the emulated GPU's

A profile is judged on runs that it was not calibrated on. With `--probes`, the profile is derived anew by this version
from the probes' records that notebook 00 keeps (`machine/results.jsonl`). Runs of one setting count once, with the
median of all their generations.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from helpers import calibration  # noqa: E402
from helpers.analysis import readers  # noqa: E402
from helpers.lab import describe  # noqa: E402
from helpers.machine import profiles  # noqa: E402
from helpers.machine.emulation import EMULATED_T4  # noqa: E402
from helpers.machine.profiles import T4_COLAB, T4_GCP, MachineProfile  # noqa: E402
from helpers.predict.time_model import Prediction, predict  # noqa: E402
from helpers.results import Log, RunRecord  # noqa: E402
from helpers.settings import OffloadSplit, RunSettings, Workload  # noqa: E402

REFERENCE = ROOT / "outputs" / "reference"
# The hand-in's runs that give t4-colab's rates.
CALIBRATED_ON = ("q1-1", "q1-2", "q1-5", "q3-gpu-4bit")
SWITCHES = ("compress_weight", "compress_cache", "cpu_cache_compute", "pin_weight", "overlap")


@dataclass(frozen=True)
class Judged:
    """A measured run and its prediction. Peaks in GiB, empty where none was published."""

    settings: RunSettings
    tok_s: float
    prediction: Prediction
    peaks_gib: tuple[float, ...] = ()

    @property
    def error(self) -> float:
        return self.prediction.total_throughput_tok_s / self.tok_s - 1

    @property
    def within_bounds(self) -> bool:
        lowest, highest = self.prediction.total_throughput_tok_s_bounds
        return lowest <= self.tok_s <= highest

    @property
    def peaks_within_range(self) -> bool:
        low, high = self.prediction.peak_gpu_mem_gib_range
        return all(low - 5e-4 <= peak <= high + 5e-4 for peak in self.peaks_gib)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", nargs="?")
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--probes", type=Path, help="the probes' records, to derive the profile from them anew")
    parser.add_argument("--emulated", type=Path, help="a log of runs on the emulated GPU")
    parser.add_argument("--runs", action="store_true", help="show each run")
    options = parser.parse_args()
    if options.profile:
        profile = profiles.load(options.profile)
        if options.probes:
            by_settings = {record.settings: record for record in Log(options.probes)}
            probes = calibration.probes()
            profile = calibration.with_probes(profile, {field: by_settings[probes[field]] for field in probes})
        machines = {profile.name: judge(profile, options.results)}
    elif options.emulated:
        machines = {EMULATED_T4.name: judge(EMULATED_T4, [options.emulated])}
    else:
        machines = references()
    for name, judged in machines.items():
        if options.runs or options.profile or options.emulated:
            print(f"### {name}\n\n{runs_table(judged)}\n")
    print(summary(machines))


def references() -> dict[str, list[Judged]]:
    """The kept references, by the name of their machine."""
    found = {T4_COLAB.name: hand_in(), T4_GCP.name: paper()}
    for folder in sorted((REFERENCE / "h200" / "predictions").iterdir()):
        profile = profiles.load(str(folder / "machine-profile.json"))
        found[f"H200, machine {folder.name}"] = judge(profile, [folder / "results.jsonl"])
    emulated = REFERENCE / "emulated" / "results.jsonl"
    if emulated.is_file():
        found[EMULATED_T4.name] = judge(EMULATED_T4, [emulated])
    return found


def hand_in() -> list[Judged]:
    """The hand-in's runs that t4-colab was not calibrated on."""
    judged = []
    for run in readers.read(REFERENCE / "t4-colab" / "figures.csv"):
        if run.total_throughput_tok_s is None or run.run_id in CALIBRATED_ON or run.settings.debug_mode:
            continue
        peaks = (run.peak_gpu_mem_gib,) if run.peak_gpu_mem_gib else ()
        judged.append(Judged(run.settings, run.total_throughput_tok_s, predict(run.settings, T4_COLAB), peaks))
    return judged


def paper() -> list[Judged]:
    """The runs that FlexGen's authors published, with each row's own flags."""
    judged = []
    with open(REFERENCE / "flexgen-paper" / "figures.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            workload = Workload(
                gpu_batch_size=int(row["gpu_batch_size"]),
                num_gpu_batches=int(row["num_gpu_batches"]),
                prompt_len=int(row["prompt_len"]),
                gen_len=int(row["gen_len"]),
            )
            settings = RunSettings(
                model=row["model"],
                split=OffloadSplit.parse(row["percent"]),
                workload=workload,
                device="cuda",
                **{switch: row[switch] == "true" for switch in SWITCHES},
            )
            judged.append(Judged(settings, float(row["published_tok_s"]), predict(settings, T4_GCP)))
    return judged


def judge(profile: MachineProfile, files: Sequence[Path]) -> list[Judged]:
    judged = []
    for records in by_setting(files):
        settings = records[0].settings
        tok_s = statistics.median(figure for record in records for figure in record.throughputs_tok_s)
        peaks = tuple(record.peak_gpu_mem_gib for record in records if record.peak_gpu_mem_gib is not None)
        judged.append(Judged(settings, tok_s, predict(settings, profile), peaks))
    return judged


def by_setting(files: Iterable[Path]) -> list[list[RunRecord]]:
    """The finished runs, those together that differ only in their number of repeats, or in the page cache where they
    read nothing from the disk. FlexGen's projections are left out."""
    found: dict[str, list[RunRecord]] = {}
    for record in (record for path in files for record in Log(path)):
        if record.status != "done" or record.projected:
            continue
        same = {"repeats": 1} | ({} if record.bytes_expected_from_disk else {"page_cache": "natural"})
        found.setdefault(record.settings.model_copy(update=same).model_dump_json(), []).append(record)
    return list(found.values())


def summary(machines: dict[str, list[Judged]]) -> str:
    """A row for each machine: mean and largest error, and how often bounds and ranges held."""
    return "\n".join(
        [
            "| profile | runs judged | mean error | largest error | within bounds | peaks within range |",
            "|---|---|---|---|---|---|",
            *(_summary_row(name, judged) for name, judged in machines.items() if judged),
        ]
    )


def _summary_row(name: str, judged: Sequence[Judged]) -> str:
    errors = [abs(one.error) for one in judged]
    with_peaks = [one for one in judged if one.peaks_gib]
    peaks = f"{sum(one.peaks_within_range for one in with_peaks)} of {len(with_peaks)}" if with_peaks else "-"
    return (
        f"| {name} | {len(judged)} | {statistics.fmean(errors):.1%} | {max(errors):.1%} "
        f"| {sum(one.within_bounds for one in judged)} of {len(judged)} | {peaks} |"
    )


def runs_table(judged: Sequence[Judged]) -> str:
    return "\n".join(_runs_rows(judged))


def _runs_rows(judged: Sequence[Judged]) -> Iterator[str]:
    yield "| run | measured (token/s) | predicted | bounds | error | measured (GiB) | predicted |"
    yield "|---|---|---|---|---|---|---|"
    for one in judged:
        found = one.prediction
        bounds = " to ".join(f"{bound:.3g}" for bound in found.total_throughput_tok_s_bounds)
        peak = f"{statistics.median(one.peaks_gib):.3f}" if one.peaks_gib else "-"
        work = one.settings.workload
        outside = "" if one.within_bounds else " (outside)"
        yield (
            f"| {describe(one.settings)}, {work.prompt_len} + {work.gen_len} tokens | {one.tok_s:.3g} "
            f"| {found.total_throughput_tok_s:.3g} | {bounds}{outside} | {one.error:+.1%} "
            f"| {peak} | {found.peak_gpu_mem_gib:.3f} |"
        )


if __name__ == "__main__":
    main()
