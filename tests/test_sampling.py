"""What is sampled beside a run: true on a real disk, and never the reason that a run fails."""
# ruff: noqa: E501 (recorded text has its own width)

import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import psutil
import pynvml
import pytest
from hypothesis import given, strategies as st

from fake_nvml import FakeDriver, Gpu
from helpers import sampling
from helpers.machine import ceilings, disks, gpus, mounts
from helpers.results import Samples
from helpers.sampling import Sampler, disk
from helpers.sampling.disk import Reading, parse_iostat, rates_between, read_by_others
from helpers.sampling.gpu_memory import GpuMemory
from helpers.sampling.host_memory import HostMemory, process_tree

MIB = 2**20

# Two reports each: since boot, then one second. 12.6.1 as it was printed here while a file was read; the others
# are laid out as those versions lay them out.
SYSSTAT_12 = """\
Linux 6.18.44 (vm) \t11/30/26 \t_x86_64_\t(2 CPU)


Device            r/s     rkB/s   rrqm/s  %rrqm r_await rareq-sz     w/s     wkB/s   wrqm/s  %wrqm w_await wareq-sz     d/s     dkB/s   drqm/s  %drqm d_await dareq-sz     f/s f_await  aqu-sz  %util
vda             33.93   1288.40    11.01  24.49    0.19    37.97    6.74   2401.64    69.99  91.22    2.51   356.31    3.58    144.95     0.04   1.12    0.05    40.47    0.40    0.03    0.02   0.49


Device            r/s     rkB/s   rrqm/s  %rrqm r_await rareq-sz     w/s     wkB/s   wrqm/s  %wrqm w_await wareq-sz     d/s     dkB/s   drqm/s  %drqm d_await dareq-sz     f/s f_await  aqu-sz  %util
vda            259.00 921600.00     4.00   1.52    4.09  3558.30    0.00      0.00     0.00   0.00    0.00     0.00    0.00      0.00     0.00   0.00    0.00     0.00    0.00    0.00    1.06  25.60

"""
SYSSTAT_11_7 = """\
Linux 4.18.0 (host) \t11/30/26 \t_x86_64_\t(2 CPU)

Device            r/s     w/s     rkB/s     wkB/s   rrqm/s   wrqm/s  %rrqm  %wrqm r_await w_await aqu-sz rareq-sz wareq-sz  svctm  %util
vda              0.44    3.31     24.13    186.00     0.00     2.62   0.14  44.26    5.12   58.56   0.19    55.45    56.28   0.79   0.29

Device            r/s     w/s     rkB/s     wkB/s   rrqm/s   wrqm/s  %rrqm  %wrqm r_await w_await aqu-sz rareq-sz wareq-sz  svctm  %util
vda            259.00    1.00 921600.00      4.00     4.00     0.00   1.52   0.00    4.09    0.00   1.06  3558.30     4.00   0.98  25.60

"""
SYSSTAT_10 = """\
Linux 3.10.0 (host) \t11/30/26 \t_x86_64_\t(2 CPU)

Device:         rrqm/s   wrqm/s     r/s     w/s    rkB/s    wkB/s avgrq-sz avgqu-sz   await r_await w_await  svctm  %util
vda               0.00     0.09    0.07   13.91     6.83    81.26    12.61     0.01    0.93   11.40    0.88   0.38   0.53

Device:         rrqm/s   wrqm/s     r/s     w/s    rkB/s    wkB/s avgrq-sz avgqu-sz   await r_await w_await  svctm  %util
vda               4.00     0.00  259.00 1000.00 921600.00 4000.00  1470.40     1.06    4.09    4.09    0.00   0.98  25.60

"""
VERSIONS = {
    "12.6.1": SYSSTAT_12,
    "11.7": SYSSTAT_11_7,
    "10.1": SYSSTAT_10,
    "comma locale": SYSSTAT_12.replace(".", ","),
}


def rows(text: str, device: str = "vda") -> list[disk.IostatRow]:
    return list(parse_iostat(text.splitlines(keepends=True), device))


# ---------------------------------------------------------------- iostat's text


@pytest.mark.parametrize("text", VERSIONS.values(), ids=VERSIONS)
def test_every_version_parses_alike_without_the_boot_mean(text):
    (row,) = rows(text)
    assert (row.reads_per_s, row.read_kib_per_s, row.util_percent) == (259.0, 921600.0, 25.6)
    # avgrq-sz of old versions mixes reads and writes, in sectors: 735 KiB here, where reads were 3558.
    assert row.request_kib == pytest.approx(3558.3, abs=0.01)


@pytest.mark.parametrize("text", VERSIONS.values(), ids=VERSIONS)
def test_a_report_cut_off_anywhere_gives_all_of_a_row_or_nothing(text):
    whole = rows(text)
    for end in range(len(text)):
        assert rows(text[:end]) in ([], whole)


def test_only_the_device_itself_counts():
    assert rows(SYSSTAT_12, "vda1") == rows(SYSSTAT_12, "vd") == []


def test_util_above_100_and_idle_intervals_are_accepted():
    head = "Device r/s rkB/s rareq-sz %util\nvda 1 1 1 1\n"
    assert rows(head + "vda 5.00 20.00 4.00 100.40\n")[0].util_percent == 100.4
    assert rows(head + "vda 0.00 0.00 0.00 0.00\n")[0] == disk.IostatRow(0.0, 0.0, None, 0.0)
    assert rows(head + "vda 5.00 20.00 -nan -nan\n")[0] == disk.IostatRow(5.0, 20.0, 4.0, None)


COLUMNS = ("r/s", "rkB/s", "rareq-sz", "%util", "w/s", "wkB/s", "await", "new-in-13")


@given(
    st.permutations(COLUMNS), st.sets(st.sampled_from(COLUMNS)), st.lists(st.integers(1, 10**6), min_size=8, max_size=8)
)
def test_columns_go_by_name_in_any_order_with_any_dropped(order, dropped, numbers):
    columns = [name for name in order if name not in dropped]
    values = dict(zip(columns, (n / 100 for n in numbers)))
    report = " ".join(["Device", *columns]) + "\n" + " ".join(["sda", *(f"{v:.2f}" for v in values.values())]) + "\n"
    found = rows(report + report, "sda")
    if {"r/s", "rkB/s"} & dropped:
        assert found == []  # unknown, not zero
        return
    (row,) = found
    assert (row.reads_per_s, row.read_kib_per_s) == (values["r/s"], values["rkB/s"])
    assert row.util_percent == values.get("%util")
    assert row.request_kib == values.get("rareq-sz", values["rkB/s"] / values["r/s"])


@given(st.lists(st.text(max_size=60)))
def test_garbage_gives_no_rows_of_a_device(lines):
    assert list(parse_iostat(lines, "vda")) == []


# ---------------------------------------------------------------- counters to rates


@given(st.lists(st.tuples(st.floats(0.01, 5), st.integers(0, 10**6), st.integers(0, 10**10)), min_size=1, max_size=20))
def test_rates_times_time_are_what_the_counters_counted(steps):
    readings = [Reading(100.0, 7, 4096, 3, True)]
    for seconds, reads, read_bytes in steps:
        last = readings[-1]
        readings.append(
            Reading(last.time_s + seconds, last.reads + reads, last.read_bytes + read_bytes, last.busy_ms + 1, True)
        )
    rates = [rates_between(first, second) for first, second in itertools.pairwise(readings)]
    seconds = [second.time_s - first.time_s for first, second in itertools.pairwise(readings)]
    total_bytes = sum(rate.read_kib_per_s * 1024 * s for rate, s in zip(rates, seconds))
    assert total_bytes == pytest.approx(readings[-1].read_bytes - 4096, rel=1e-9)
    for rate, (_, reads, read_bytes) in zip(rates, steps):
        assert rate.request_kib == (read_bytes / 1024 / reads if reads else None)


def test_counters_that_went_back_or_no_time_are_no_rates():
    reading = Reading(1.0, 10, 1000, 5, True)
    assert rates_between(reading, reading) is None
    assert rates_between(reading, Reading(2.0, 3, 100, 6, True)) is None
    wrapped = rates_between(reading, Reading(2.0, 11, 2024, 1, True))  # io_ticks has 32 bits
    assert wrapped.util_percent is None and wrapped.read_kib_per_s == 1.0


def test_others_reads_are_named_only_where_they_matter():
    assert read_by_others([]) == 0
    assert read_by_others([(0, 0), (900 * MIB, 960 * MIB)]) == 0  # less than 64 MiB
    assert read_by_others([(0, 0), (9000 * MIB, 9100 * MIB)]) == 0  # less than 10 %
    assert read_by_others([(5, 7), (5, 7 + 300 * MIB)]) == 300 * MIB
    assert read_by_others([(0, 0), (100 * MIB, 100 * MIB), (0, 900 * MIB)]) == 0  # the reader has ended
    assert read_by_others([(0, 0), (0, 100 * MIB), (0, 900 * MIB)]) == 900 * MIB


# ---------------------------------------------------------------- a real run on a real disk

# Reads a file past the page cache when told to, then stays until its stdin is closed.
READER = """
import os, sys
from helpers.sampling import own_read_bytes
print("ready", flush=True)
for path in sys.stdin:
    file = os.open(path.strip(), os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    before = own_read_bytes()
    while os.read(file, 1 << 20): pass
    print(own_read_bytes() - before, flush=True)
"""


class Reader:
    """A child process that reads files when told to."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", READER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(sampling.__file__).parents[2],
        )
        self.pid = self.process.pid
        assert self.process.stdout.readline() == "ready\n"

    def read(self, path: Path) -> int:
        """Bytes that it had to take from storage, by its own count."""
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=10)
        self.process.stdout.close()


@pytest.fixture
def reader():
    child = Reader()
    yield child
    child.end()


@pytest.fixture
def cold_file(tmp_path):
    """80 MiB on a disk that counts its reads."""
    if disk.disk_counter(disks.disk_of(tmp_path).device) is None:
        pytest.skip(f"no disk counts reads here: {disks.disk_of(tmp_path).found_by}")
    path = tmp_path / "cold"
    with open(path, "wb") as file:
        file.write(os.urandom(80 * MIB))
        os.fsync(file.fileno())
    ceilings.drop_from_page_cache(path)
    return path


@pytest.fixture
def no_iostat(monkeypatch):
    monkeypatch.setattr(disk.shutil, "which", lambda name: None)


def bytes_of(series) -> float:
    ends = (0.0, *series.time_s)
    return sum(rate * 1024 * (end - start) for rate, start, end in zip(series.read_kib_per_s, ends, ends[1:]))


def test_every_byte_of_a_cold_file_is_seen(reader, cold_file, no_iostat):
    device = disks.disk_of(cold_file).device
    sampler = Sampler(cold_file.parent, gpu=False, interval_s=0.05)
    sampler.baseline(0.05)
    before = sampling.disk_counter(device)
    sampler.follow(reader.pid)
    sampler.start(time.monotonic())
    wait_until(lambda: len(sampler._disk._readings) > 2)  # an interval before the first read
    taken = reader.read(cold_file)
    samples = sampler.stop()
    given = sampling.disk_counter(device) - before
    assert taken >= 80 * MIB and given >= 80 * MIB
    assert samples.disk.source == "/proc/diskstats" and samples.disk.device == device
    assert 0.99 * 80 * MIB <= bytes_of(samples.disk) <= 1.01 * given + MIB
    assert samples.disk.idle_read_kib_per_s is not None
    assert all(size is None or size > 0 for size in samples.disk.request_kib)
    assert samples.host.peak_gib > 0.004 and len(samples.host.time_s) >= 2
    assert Samples.model_validate_json(samples.model_dump_json()) == samples


def test_a_read_from_the_page_cache_is_no_disk_read(cold_file):
    cold_file.read_bytes()
    before = sampling.own_read_bytes()
    cold_file.read_bytes()
    assert sampling.own_read_bytes() - before < MIB  # of 80; a page of this program itself may come back meanwhile


def test_another_process_on_the_same_disk_is_noted(reader, cold_file, no_iostat):
    other = Reader()
    sampler = Sampler(cold_file.parent, gpu=False, interval_s=0.05)
    sampler.follow(reader.pid)
    sampler.start(time.monotonic())
    other.read(cold_file)
    samples = sampler.stop()
    other.end()
    assert any("by something other than this run" in note for note in samples.notes)


@pytest.mark.skipif(not disk.shutil.which("iostat"), reason="no iostat here")
def test_the_installed_iostat_sees_a_cold_file(reader, cold_file):
    sampler = Sampler(cold_file.parent, gpu=False)
    sampler.follow(reader.pid)
    sampler.start(time.monotonic())
    iostat = sampler._disk._iostat
    reader.read(cold_file)
    wait_until(lambda: len(iostat.rates) >= 2)
    samples = sampler.stop()
    assert samples.disk.source.startswith("iostat 1") and samples.disk.interval_s == 1.0
    assert sum(samples.disk.read_kib_per_s) * 1024 >= 0.5 * 80 * MIB  # one a second, or slower on a busy machine
    assert not psutil.pid_exists(iostat._process.pid)


def wait_until(done) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---------------------------------------------------------------- kinds of fault

DEVICE_ROW = "   8       0 fake0 {reads} 0 {sectors} 5 0 0 0 0 0 {ticks} 5 0 0 0 0\n"


@pytest.fixture
def fake_disk(tmp_path, monkeypatch):
    """A disk of the name that the recorded texts have, whose counters a test may set."""
    diskstats = tmp_path / "diskstats"
    monkeypatch.setattr(disk, "DISKSTATS", diskstats)
    monkeypatch.setattr(disks, "disk_of", lambda path: disks.Disk("vda", "ext4", "the test"))
    monkeypatch.setattr(disk.shutil, "which", lambda name: None)

    def set_counters(reads: int, read_bytes: int = 0) -> None:
        row = DEVICE_ROW.format(reads=reads, sectors=read_bytes // 512, ticks=reads).replace("fake0", "vda")
        diskstats.with_suffix(".new").write_text(row)
        diskstats.with_suffix(".new").rename(diskstats)

    set_counters(10, 10 * MIB)
    set_counters.path = diskstats
    return set_counters


@pytest.fixture
def fake_iostat(tmp_path, monkeypatch, fake_disk):
    """Installs an `iostat` that says its version when asked, and else runs a line of shell."""

    def install(shell: str, text: str = "", version: str = "echo 'sysstat version 10.1.5'") -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "text").write_text(text)
        script = folder / "iostat"
        script.write_text(f'#!/bin/sh\nif [ "$1" = -V ]; then {version}; exit; fi\ntext={folder}/text\n{shell}\n')
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setattr(disk.shutil, "which", lambda name: str(script))

    return install


def sampled(fake_disk, until=lambda sampler: True) -> Samples:
    """A run of this process, with 4 MiB read from the fake disk at its end."""
    sampler = Sampler(Path("/"), gpu=False, interval_s=0.01)
    sampler.follow(os.getpid())
    sampler.start(time.monotonic())
    wait_until(lambda: until(sampler))
    fake_disk(26, 14 * MIB)
    return sampler.stop()


def reports(sampler: Sampler) -> int:
    return len(sampler._disk._iostat.rates)


def has_ended(sampler: Sampler) -> bool:
    iostat = sampler._disk._iostat
    return iostat._process.poll() is not None and not iostat._reader.is_alive()


@pytest.mark.parametrize("text", VERSIONS.values(), ids=VERSIONS)
def test_iostat_is_the_source_where_it_runs(fake_disk, fake_iostat, text):
    fake_iostat("cat $text; exec sleep 60", text)
    samples = sampled(fake_disk, lambda sampler: reports(sampler) == 1)
    assert samples.disk.source == "iostat 10.1.5"
    assert samples.disk.read_kib_per_s == (921600.0,) and samples.disk.util_percent == (25.6,)
    assert samples.notes == ()


@pytest.mark.parametrize(
    ("shell", "text"),
    [
        ("echo 'iostat: unrecognized option' >&2; exit 1", ""),
        (f"head -c {SYSSTAT_12.rindex('25.60')} $text", SYSSTAT_12),
        ("cat $text", "Segmentation fault\n\x00\x01 Device vda\nvda 1 2\n"),
        ("exit 0", ""),
    ],
    ids=["refuses", "cut off in a line", "garbage", "says nothing"],
)
def test_an_iostat_that_fails_leaves_the_kernels_counters(fake_disk, fake_iostat, shell, text):
    fake_iostat(shell, text)
    samples = sampled(fake_disk, lambda s: has_ended(s) and len(s._disk._readings) > 2)
    assert samples.disk.source == "/proc/diskstats"
    assert bytes_of(samples.disk) == pytest.approx(4 * MIB, rel=0.05)
    assert any("iostat gave no report" in note for note in samples.notes)


def test_kernel_counters_take_over_when_iostat_dies(fake_disk, fake_iostat, monkeypatch):
    monkeypatch.setattr(disk, "IOSTAT_INTERVAL_S", 0.02)
    fake_iostat("cat $text; exit 7", SYSSTAT_12)
    samples = sampled(fake_disk, lambda s: has_ended(s) and len(s._disk._readings) > 20)
    assert samples.disk.source == "iostat 10.1.5, then /proc/diskstats"
    assert samples.disk.read_kib_per_s[0] == 921600.0 and len(samples.disk.time_s) > 1
    assert list(samples.disk.time_s) == sorted(samples.disk.time_s)
    assert any("1 report " in note and "exit status 7" in note for note in samples.notes)


def test_a_stuck_iostat_is_killed_with_its_children(fake_disk, fake_iostat):
    fake_iostat("trap '' TERM; cat $text; sleep 60; sleep 61", SYSSTAT_12)
    seen = []

    def noted(sampler):
        seen[:] = process_tree(psutil.Process(sampler._disk._iostat._process.pid))
        return len(seen) == 2 and reports(sampler) == 1

    samples = sampled(fake_disk, noted)
    assert samples.disk.source == "iostat 10.1.5"
    _, alive = psutil.wait_procs(seen, timeout=5)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


def test_counters_that_count_nothing_are_unknown_not_zero(fake_disk):
    fake_disk.path.write_text("8 0 vda " + "0 " * 17 + "\n")
    assert disk.disk_counter("vda") is None
    sampler = Sampler(Path("/"), gpu=False)
    sampler.baseline(0)
    sampler.follow(os.getpid())
    sampler.start(time.monotonic())
    samples = sampler.stop()
    assert samples.disk is None
    assert any("unknown" in note and "zero" in note for note in samples.notes)


def test_a_disk_that_vanishes_midway_keeps_what_was_sampled(fake_disk):
    sampler = Sampler(Path("/"), gpu=False, interval_s=0.005)
    sampler.follow(os.getpid())
    sampler.start(time.monotonic())
    wait_until(lambda: len(sampler._disk._readings) > 3)
    fake_disk.path.write_text("")
    wait_until(lambda: "disk reads" not in sampler._live)
    samples = sampler.stop()
    assert len(samples.disk.time_s) >= 2
    assert any("gone from /proc/diskstats" in note for note in samples.notes)


def test_without_diskstats_psutil_is_asked(fake_disk, monkeypatch):
    fake_disk.path.unlink()
    counts = namedtuple("sdiskio", "read_count write_count read_bytes write_bytes")(5, 0, 5 * MIB, 0)
    monkeypatch.setattr(psutil, "disk_io_counters", lambda perdisk, nowrap: {"vda": counts})
    sampler = Sampler(Path("/"), gpu=False, interval_s=0.01)
    sampler.follow(os.getpid())
    sampler.start(time.monotonic())
    wait_until(lambda: len(sampler._disk._readings) > 2)
    samples = sampler.stop()
    assert samples.disk.source == "psutil"
    assert set(samples.disk.util_percent) == {None} and set(samples.disk.read_kib_per_s) == {0.0}
    assert disk.disk_counter("vda") is None


@pytest.mark.parametrize("answer", [None, {}, FileNotFoundError("no /proc/diskstats"), NotImplementedError("no")])
def test_without_any_counters_the_note_says_so(fake_disk, monkeypatch, answer):
    fake_disk.path.unlink()

    def disk_io_counters(perdisk, nowrap):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(psutil, "disk_io_counters", disk_io_counters)
    samples = sampled(lambda *_: None)
    assert samples.disk is None and samples.host is not None
    assert any("nothing counts the reads of vda" in note for note in samples.notes)


def test_a_folder_in_memory_has_no_disk_series():
    if not disks.disk_of(Path("/dev/shm")).is_memory:
        pytest.skip("no tmpfs here")
    samples = sampled_in(Path("/dev/shm"))
    assert samples.disk is None
    assert any("tmpfs is memory" in note for note in samples.notes)


def sampled_in(folder: Path) -> Samples:
    sampler = Sampler(folder, gpu=False)
    sampler.baseline(0)
    sampler.follow(os.getpid())
    sampler.start(time.monotonic())
    return sampler.stop()


def test_a_process_that_is_gone_is_a_note(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    sampler = Sampler(tmp_path, gpu=False)
    sampler.follow(child.pid)
    sampler.start(time.monotonic())
    samples = sampler.stop()
    assert samples.host is None
    assert any(str(child.pid) in note for note in samples.notes)


def test_a_sampler_that_never_started_can_be_stopped(tmp_path):
    samples = Sampler(tmp_path, gpu=True).stop()
    assert samples.disk is samples.gpu is samples.host is None


@pytest.mark.parametrize("part", ["sample", "series", "baseline", "start", "close"])
def test_nothing_that_breaks_inside_reaches_the_run(tmp_path, monkeypatch, part):
    def breaks(*arguments):
        raise ZeroDivisionError("a fault of the sampler's own")

    for source in (disk.DiskReads, HostMemory):
        monkeypatch.setattr(source, part, breaks, raising=False)
    samples = sampled_in(tmp_path)
    if disks.disk_of(tmp_path).device:
        assert any("a fault of the sampler's own" in note for note in samples.notes)


def test_host_memory_is_the_sum_over_the_tree():
    # Parent and child each hold 64 MiB of their own.
    code = "import subprocess, sys; held = b'x' * (64 << 20); "
    child = code + "print('ready', flush=True); sys.stdin.read()"
    parent = code + f"subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    memory = HostMemory()
    tree = process_tree(psutil.Process(process.pid))
    memory.sample(tree)
    process.stdin.close()
    process.wait(timeout=10)
    process.stdout.close()
    memory.sample(tree)  # both are gone: no sample, not zero
    series = memory.series(0.0)
    assert len(series.used_gib) == 1
    assert 128 / 1024 <= series.peak_gib < 400 / 1024


def test_gpu_memory_is_sampled_or_its_absence_noted(tmp_path):
    sampler = Sampler(tmp_path, gpu=True)
    sampler.baseline(0)
    sampler.follow(os.getpid())
    sampler.start(time.monotonic())
    samples = sampler.stop()
    if gpus.cuda_available():
        assert samples.gpu.what == "device memory in use by all processes (NVML)"
        assert 0 < samples.gpu.peak_gib <= gpus.visible()[0].total_gib
    else:
        assert samples.gpu is None
        assert any(note.startswith("GPU memory not sampled") for note in samples.notes)


@pytest.fixture
def driver(monkeypatch):
    two = FakeDriver(monkeypatch, Gpu("Tesla A"), Gpu("Tesla B"))
    two.gpus["GPU-b"].used_gib = 2.0
    return two


def gpu_sampled(driver: FakeDriver, processes_during: set[int]) -> Samples:
    sampler = Sampler(Path("/dev/shm"), gpu=True, interval_s=0.005)
    sampler.baseline(0)
    sampler.follow(os.getpid())
    sampler.start(time.monotonic())
    driver.gpus["GPU-b"].processes = dict.fromkeys(processes_during, 1.0)
    driver.gpus["GPU-b"].used_gib = 5.0
    samples = sampler.stop()
    assert driver.open == 0
    return samples


def test_the_gpu_that_cuda_uses_is_the_one_sampled(driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    samples = gpu_sampled(driver, {101})
    assert (samples.gpu.used_gib[0], samples.gpu.peak_gib) == (2.0, 5.0)
    assert not any("process" in note for note in samples.notes)  # the run itself doesn't count
    assert [(gpu.index, gpu.name, gpu.free_gib) for gpu in gpus.visible()] == [(0, "Tesla B", 11.0)]
    assert driver.open == 0


def test_other_processes_on_the_gpu_are_noted(driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    driver.gpus["GPU-b"].processes = {os.getpid(): 1.0, 7: 1.0}
    samples = gpu_sampled(driver, {os.getpid(), 7, 101, 8, 9})
    assert "before the run: 1 other process on the GPU, 2.00 GiB of its memory in use" in samples.notes
    assert "during the run 2 other processes came to the GPU" in samples.notes
    assert gpus.visible()[0].other_processes == 4


def test_processes_that_the_driver_does_not_list_are_unknown(driver):
    for gpu in driver.gpus.values():
        gpu.process_error = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert [gpu.other_processes for gpu in gpus.visible()] == [None, None]
    assert gpu_sampled(driver, {1}).gpu.used_gib[0] == 1.0


def test_a_gpu_that_is_lost_during_the_run_keeps_its_samples(driver):
    sampler = Sampler(Path("/dev/shm"), gpu=True, interval_s=0.005)
    sampler.follow(os.getpid())
    sampler.start(time.monotonic())
    driver.gpus["GPU-a"].broken = pynvml.NVML_ERROR_GPU_IS_LOST
    samples = sampler.stop()
    assert samples.gpu.peak_gib == 1.0 and driver.open == 0
    assert any("GPU memory not sampled any more" in note for note in samples.notes)


def test_hidden_gpus_are_a_note_too(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    samples = Sampler(tmp_path, gpu=True).stop()
    assert samples.gpu is None
    assert any(note.startswith("GPU memory not sampled") for note in samples.notes)
    with pytest.raises((LookupError, pynvml.NVMLError)):
        GpuMemory()


def test_times_count_from_the_runs_start(tmp_path):
    sampler = Sampler(tmp_path, gpu=False)
    sampler.follow(os.getpid())
    sampler.start(time.monotonic() - 1000)
    times = sampler.stop().host.time_s
    assert all(1000 <= t < 1100 and math.isfinite(t) for t in times)


# ---------------------------------------------------------------- pauses


def child() -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def test_a_stopped_run_is_noticed(tmp_path):
    process = child()
    sampler = Sampler(tmp_path, gpu=False, interval_s=0.01)
    sampler.follow(process.pid)
    started_s = time.monotonic()
    sampler.start(started_s)
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.3)
    process.send_signal(signal.SIGCONT)
    ended_s = time.monotonic()
    sampler.stop()
    process.communicate(b"\n")
    assert 0.2 < sampler.paused_s(started_s, ended_s) < ended_s - started_s + 0.1
    assert sampler.paused_s(started_s - 10, started_s - 5) == 0.0


SAMPLED = """
import os, sys, time
from pathlib import Path
from helpers.sampling import Sampler
sampler = Sampler(Path(sys.argv[1]), gpu=False, interval_s=0.1)
started_s = time.monotonic()
sampler.follow(os.getpid())
sampler.start(started_s)
print("started", flush=True)
input()
sampler.stop()
print(sampler.paused_s(started_s, time.monotonic()))
"""


@pytest.fixture
def freezer():
    """A cgroup whose processes a test can freeze, as `docker pause` does."""
    mounted = mounts.parse_mountinfo(Path("/proc/self/mountinfo").read_text())
    tops = [Path(mount.mount_point) for mount in mounted if mount.filesystem == "cgroup2"]
    if not tops or not os.access(tops[0], os.W_OK):
        pytest.skip("no cgroup v2 that may be changed here")
    folder = tops[0] / f"offload-lab-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    (folder / "cgroup.freeze").write_text("0")
    folder.rmdir()


@pytest.mark.parametrize("frozen_s", [0, 3])
def test_a_frozen_cgroup_is_noticed(tmp_path, freezer, frozen_s):
    process = subprocess.Popen(
        [sys.executable, "-c", SAMPLED, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(sampling.__file__).parents[2],
    )
    assert process.stdout.readline() == "started\n"
    (freezer / "cgroup.procs").write_text(str(process.pid))
    if frozen_s:
        (freezer / "cgroup.freeze").write_text("1")
        time.sleep(frozen_s)
        (freezer / "cgroup.freeze").write_text("0")
    said, _ = process.communicate("\n")
    assert (float(said) >= frozen_s - 0.2) if frozen_s else (float(said) == 0.0)


@pytest.mark.parametrize(
    "shell", ["echo 'iostat: invalid option -- V' >&2; exit 1", "echo 'usage: iostat [-CUdIKoT?]'"]
)
def test_an_iostat_that_is_not_sysstats_is_not_used(fake_disk, fake_iostat, shell):
    """BusyBox's and macOS's answers to -V, by a stand-in."""
    fake_iostat("exec sleep 60", version=shell)
    samples = sampled(fake_disk, lambda s: len(s._disk._readings) > 2)
    assert disk.iostat_version() is None and samples.disk.source == "/proc/diskstats"
    assert any("not sysstat's" in note for note in samples.notes)
