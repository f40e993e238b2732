"""Predictions judged on a CUDA machine: `python benchmarks/judge_predictions.py PROFILE.json RESULTS.jsonl...`

The profile is notebook 00's alone; no run that is judged here was looked at for it.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from helpers import machine_profiles, time_model
from helpers.lab import describe
from helpers.results import Log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profile")
    parser.add_argument("results", nargs="+", type=Path)
    options = parser.parse_args()
    profile = machine_profiles.load(options.profile)
    errors = []
    print("| run | measured (token/s) | predicted | error | measured (GiB) | predicted | inside its range |")
    print("|---|---|---|---|---|---|---|")
    for path in options.results:
        for record in Log(path):
            settings = record.settings
            if record.status != "done" or record.projected or settings.disk_reader != "stock":
                continue
            found = time_model.predict(settings, profile)
            error = found.total_throughput_tok_s / record.total_throughput_tok_s - 1
            errors.append(abs(error))
            low, high = found.peak_gpu_mem_gib_range
            inside = low - 5e-4 <= record.peak_gpu_mem_gib <= high + 5e-4
            print(
                f"| {describe(settings)} | {record.total_throughput_tok_s:.2f} | {found.total_throughput_tok_s:.2f} "
                f"| {error:+.1%} | {record.peak_gpu_mem_gib:.3f} | {found.peak_gpu_mem_gib:.3f} "
                f"| {'yes' if inside else 'no'} |"
            )
    print(f"\n{len(errors)} runs, mean absolute error {statistics.fmean(errors):.1%}, largest {max(errors):.1%}")


if __name__ == "__main__":
    main()
