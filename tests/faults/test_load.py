"""Load: long logs and long sweeps, with nothing piling up."""

from __future__ import annotations

import contextlib
import gc
import threading
import time

import matplotlib.pyplot as plt
import psutil
import pytest

from factories import disk_series, done, make_record, mini, quiet
from helpers import lab, results
from helpers.analysis import readers
from helpers.engine import launcher
from helpers.report import document
from helpers.results import Log, MemorySeries, Samples
from helpers.settings import Workload

RECORDS, RUNS = 100_000, 500
LOAD_S, ANALYSE_S = 2.0, 10.0  # the promise
BUSY = 3.0  # what a machine that others use too may take longer


@pytest.fixture(scope="module")
def long_log(tmp_path_factory):
    """100,000 records with samples, of 500 runs measured again and again; a torn line in the middle and at the end."""
    moments = tuple(float(i) for i in range(20))
    memory = MemorySeries(what="memory", time_s=moments, used_gib=moments)
    record = make_record(samples=Samples(disk=disk_series(), gpu=memory, host=memory))
    splits = [(gpu, cpu) for gpu in range(101) for cpu in range(101 - gpu)][:RUNS]
    lines = []
    for number, (gpu, cpu) in enumerate(splits):
        text = record.model_dump_json()
        text = text.replace('"weights_gpu":0,"weights_cpu":0', f'"weights_gpu":{gpu},"weights_cpu":{cpu}')
        lines.append(text.replace(record.key, f"{number:016x}").encode() + b"\n")
    path = tmp_path_factory.mktemp("load") / results.LOG_NAME
    with open(path, "wb") as log:
        for _ in range(RECORDS // RUNS // 2):
            log.writelines(lines)
        log.write(lines[0][:500] + b"\n")
        for _ in range(RECORDS // RUNS // 2):
            log.writelines(lines)
        log.write(lines[0][:700])
    return path


@contextlib.contextmanager
def within(seconds: float, what: str):
    """Processor seconds of this process, so that others on the machine do not count."""
    began = time.process_time()
    yield
    took = time.process_time() - began
    print(f"{what}: {took:.2f} s")
    assert took < seconds * BUSY, f"{what} took {took:.1f} s of {seconds:.0f} s"


@pytest.mark.filterwarnings("ignore:.*not a record, skipped")
def test_a_log_of_100_000_records_loads_and_analyses(long_log, tmp_path):
    with within(LOAD_S, "load, of a homework's eleven runs"):
        latest = Log(long_log).latest([f"{number:016x}" for number in range(11)])
    assert len(latest) == 11
    with within(LOAD_S, "load, of every run"):
        latest = Log(long_log).latest()
    assert len(latest) == RUNS
    with within(ANALYSE_S, "analyze"):
        document.analyze([long_log], tmp_path / "out")
    assert (tmp_path / "out" / "report.html").stat().st_size < 5e6


def test_looked_through_or_read_whole_a_log_says_the_same(tmp_path):
    """`latest` against its definition, over done and failed records, torn lines and lines that are none."""
    log = Log(tmp_path / "some.jsonl")
    failed = {"status": "failed", "failure": {"kind": "timeout", "message": "too long"}}
    for number, (key, fields) in enumerate(
        [("a", {}), ("b", failed), ("a", failed), ("b", failed), ("c", failed), ("c", {}), ("a", {}), ("d", failed)]
    ):
        from helpers.results import Failure

        fields = {**fields, "failure": Failure(**fields["failure"])} if fields else {}
        log.append(make_record(key=key, duration_s=float(number), **fields))
        with open(log.path, "ab") as file:
            file.write((b'{"schema_version":1,"key"', b"\n", b"[]\n", b"{}\n")[number % 4])
    expected: dict = {}
    with pytest.warns(UserWarning, match="not a record"):
        for record in log:
            known = expected.get(record.key)
            if known is None or record.status == "done" or known.status == "failed":
                expected[record.key] = record
    with pytest.warns(UserWarning, match="not a record"):
        assert log.latest() == expected and list(log.latest()) == list(expected)
    with pytest.warns(UserWarning, match="not a record"):
        assert log.latest({"b", "x"}) == {"b": expected["b"]}


def test_a_record_that_is_damaged_inside_gives_way_to_the_one_before_it(tmp_path):
    log = Log(tmp_path / "some.jsonl")
    for seconds in (1.0, 2.0):
        log.append(make_record(key="a", duration_s=seconds))
    text = log.path.read_text().replace('"duration_s":2.0', '"duration_s":"2.0"')
    log.path.write_text(text)
    with pytest.warns(UserWarning, match="line 2: not a record"):
        assert log.latest()["a"].duration_s == 1.0


# ---- sweeps


def held() -> dict[str, float]:
    """What this process and those it started hold now."""
    gc.collect()
    me = psutil.Process()
    return {
        "processes": len(me.children(recursive=True)),
        "threads": threading.active_count(),
        "file handles": me.num_fds(),
        "file handles of the server": sum(child.num_fds() for child in me.children()),
        "figures": len(plt.get_fignums()),
        "MiB": me.memory_info().rss / 2**20,
        "MiB of the server": sum(child.memory_info().rss for child in me.children()) / 2**20,
    }


def sweep(count: int, output, offload) -> None:
    """Runs that differ in the length of their prompt, one call each, as cells of a notebook make them."""
    for number in range(count):
        work = Workload(gpu_batch_size=1, prompt_len=8 + number % 400, gen_len=2 + number // 400)
        (record,) = lab.run(mini(workload=work), output, offload_root=offload, say=quiet).records.values()
        done(record)
        if number % 10 == 9:
            document.write(readers.read(output / results.LOG_NAME), output)


def assert_nothing_piles_up(count, tmp_path, shortest_baseline, monkeypatch):
    if shortest_baseline:  # what others read before a run: half a second each
        original = launcher.Sampler.baseline
        monkeypatch.setattr(launcher.Sampler, "baseline", lambda sampler: original(sampler, 0.01))
    warm = max(10, count // 10)
    sweep(warm, tmp_path / "warm", tmp_path / "offload")  # imports, fonts, caches
    before = held()
    sweep(count, tmp_path / "out", tmp_path / "offload")
    after = held()
    print(before, after, sep="\n")
    for what in ("processes", "threads", "file handles", "file handles of the server", "figures"):
        assert after[what] <= before[what], f"{what}: {before[what]} before {count} runs, {after[what]} after"
    for what in ("MiB", "MiB of the server"):
        assert after[what] - before[what] < 20 + 0.2 * count, what
    assert not (tmp_path / "offload").exists()


def test_a_sweep_leaves_nothing_behind(tmp_path, monkeypatch):
    assert_nothing_piles_up(40, tmp_path, True, monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_sweep_of_500_runs_leaves_nothing_behind(tmp_path, monkeypatch):
    assert_nothing_piles_up(500, tmp_path, False, monkeypatch)
