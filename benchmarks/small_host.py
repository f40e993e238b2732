"""Run a command as on a smaller host: a memory limit, page cache included, and a slower disk. Needs root and cgroups.

    python benchmarks/small_host.py --memory-gib 11.2 --disk-mb-s 252 -- \\
        .venv/bin/python -m helpers run machine faster --device cuda --repeats 1 --output outputs/small-host

The figures above are those of Colab's T4 host. The page cache is dropped first: what is cached outside of the cgroup
would be served to it free of charge. Notebook 00 (`machine`) then measures the limited host, for predictions.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from page_cache_limit import cgroup, drop_page_cache  # noqa: E402

from helpers.home import home  # noqa: E402
from helpers.machine import disks  # noqa: E402
from helpers.units import GIB  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory-gib", type=float, required=True)
    parser.add_argument("--disk-mb-s", type=float, help="reads, in 10^6 bytes per second; default: unlimited")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command; put it after --")
    lab_home = home()
    device = disks.disk_of(lab_home).device
    if options.disk_mb_s and device is None:
        parser.error(f"{lab_home}: no disk that could be slowed down")
    drop_page_cache([file for file in lab_home.rglob("*") if file.is_file()])
    with cgroup() as group:
        group.limit_memory(int(options.memory_gib * GIB))
        if options.disk_mb_s and device:
            group.limit_disk(device, int(options.disk_mb_s * 1e6))
        inside = f'echo $$ | tee {group.memory}/cgroup.procs {group.disk}/cgroup.procs > /dev/null && exec "$@"'
        return subprocess.run(["bash", "-c", inside, "bash", *command]).returncode


if __name__ == "__main__":
    sys.exit(main())
