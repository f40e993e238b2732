"""Predictions judged on a CUDA machine: `python benchmarks/judge_predictions.py PROFILE.json RESULTS.jsonl...`

The profile is notebook 00's alone; no run that is judged here was looked at for it. With `--probes` it is made anew, by
this version, from the probes' records that notebook 00 keeps (`machine/results.jsonl`). A setting that was run several
times counts once, with the median of all its generations.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers import calibration
from helpers.lab import describe
from helpers.machine import profiles
from helpers.predict import time_model
from helpers.results import Log, RunRecord


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profile")
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--probes", type=Path, help="the probes' records, to read the profile from them anew")
    options = parser.parse_args()
    profile = profiles.load(options.profile)
    if options.probes:
        by_settings = {record.settings: record for record in Log(options.probes)}
        probes = calibration.probes()
        profile = calibration.with_probes(profile, {field: by_settings[probes[field]] for field in probes})
    errors: dict[bool, list[float]] = {True: [], False: []}  # by whether the run reads the disk
    print("| run | measured (token/s) | predicted | error | measured (GiB) | predicted | inside its range |")
    print("|---|---|---|---|---|---|---|")
    for records in by_setting(options.results):
        settings = records[0].settings
        measured = statistics.median(figure for record in records for figure in record.throughputs_tok_s)
        peaks_gib = [record.peak_gpu_mem_gib for record in records]
        found = time_model.predict(settings, profile)
        error = found.total_throughput_tok_s / measured - 1
        errors[reads_disk(records[0])].append(abs(error))
        low, high = found.peak_gpu_mem_gib_range
        inside = all(low - 5e-4 <= peak <= high + 5e-4 for peak in peaks_gib)
        print(
            f"| {describe(settings)} | {measured:.2f} | {found.total_throughput_tok_s:.2f} | {error:+.1%} "
            f"| {statistics.median(peaks_gib):.3f} | {found.peak_gpu_mem_gib:.3f} | {'yes' if inside else 'no'} |"
        )
    print()
    for what, of_kind in (
        ("that read the disk tier", errors[True]),
        ("that do not", errors[False]),
        ("in all", errors[True] + errors[False]),
    ):
        if of_kind:
            mean, largest = statistics.fmean(of_kind), max(of_kind)
            print(f"{len(of_kind)} settings {what}: mean error {mean:.1%}, largest {largest:.1%}")


def by_setting(files: Sequence[Path]) -> list[list[RunRecord]]:
    """The finished runs by what can make their figures differ: not by their number of repeats, nor by the page cache
    where nothing is read from the disk. Those that FlexGen projects, or that it does not read itself, are left out."""
    found: dict[str, list[RunRecord]] = {}
    for record in (record for path in files for record in Log(path)):
        settings = record.settings
        if record.status != "done" or record.projected or settings.disk_reader != "stock":
            continue
        same = {"repeats": 1} | ({} if reads_disk(record) else {"page_cache": "natural"})
        found.setdefault(settings.model_copy(update=same).model_dump_json(), []).append(record)
    return list(found.values())


def reads_disk(record: RunRecord) -> bool:
    return record.bytes_expected_from_disk > 0


if __name__ == "__main__":
    main()
