"""No answer contradicts the machine that produced the figures.

A machine is drawn at random: PCIe, disk, page cache, launch and compute times over three orders of magnitude. Its runs'
figures follow from a time model of its own, unrelated to the answers' code, and every claim is checked against it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from hypothesis import given, settings as hypothesis_settings, strategies as st

from helpers import analysis
from helpers.analysis.offload_sweep import STEPS
from helpers.homework import DISK, GPU
from helpers.runs import Run
from helpers.settings import OffloadSplit, RunSettings, Workload
from test_analysis import readable

SPLITS = (GPU, "50 50 100 0 100 0", "50 0 100 0 100 0", "0 50 100 0 100 0", DISK)
EXTRA_SPLITS = ("20 80 100 0 100 0", "0 100 100 0 100 0", "30 20 100 0 100 0")
PASSES, LAYERS = 16, 50
NAMES = ("compute", "PCIe", "Disk")
EXACT = 1 + 1e-6


@dataclass(frozen=True)
class Drawn:
    """Rates in bytes/s, times in seconds of a pass. With an `overlap` of 1 the longest part hides the others."""

    pcie: float
    disk: float
    page_cache_rate: float
    page_cache_bytes: float
    launch_s: float
    compute_s: float  # for one sequence
    dequantize_s: float
    overlap: float
    in_series: bool  # bytes from disk wait for PCIe too
    counted: bool  # bytes from disk were counted; else only iostat's peak is known

    def cached(self, run: Run) -> bool:
        return run.placement.disk_bytes_per_pass <= self.page_cache_bytes

    def tier_rate(self, run: Run) -> float:
        return self.page_cache_rate if self.cached(run) else self.disk

    def parts(self, run: Run) -> dict[str, float]:
        computing = self.launch_s + self.compute_s * run.workload.gpu_batch_size
        placement = run.placement
        return {
            "compute": computing + (self.dequantize_s if run.compress_weight else 0.0),
            "PCIe": placement.host_to_device_bytes_per_pass / self.pcie,
            "Disk": placement.disk_bytes_per_pass / self.tier_rate(run),
        }

    def pass_s(self, run: Run) -> float:
        computing, copying, reading = self.parts(run).values()
        longest = max(computing, copying + reading) if self.in_series else max(computing, copying, reading)
        return self.overlap * longest + (1 - self.overlap) * (computing + copying + reading)

    def run(self, percent: str, batch: int = 4, compress: bool = False, breakdown: bool = False) -> Run:
        settings = RunSettings(
            model="opt-1.3b",
            split=OffloadSplit.parse(percent),
            workload=Workload(gpu_batch_size=batch),
            device="cuda",
            compress_weight=compress,
            debug_mode="breakdown" if breakdown else None,
        )
        run = Run(run_id=f"{percent} b{batch}", kind="quoted", source="drawn", settings=settings)
        if breakdown:
            computing, copying, reading = self.parts(run).values()
            figures = {
                "load_weight_s": (copying + reading + 1e-6) / LAYERS,
                "compute_layer_decoding_s": computing / LAYERS,
            }
            return run.model_copy(update=figures)
        return run.model_copy(update={"total_throughput_tok_s": batch / self.pass_s(run), **self._disk_figures(run)})

    def _disk_figures(self, run: Run) -> dict[str, object]:
        expected = run.placement.disk_bytes_per_pass * PASSES
        if not expected:
            return {}
        read = 0 if self.cached(run) else expected
        figures: dict[str, object] = {"bytes_from_disk": read} if self.counted else {}
        if run.split == OffloadSplit.parse(DISK) and not run.compress_weight:
            figures |= {
                "disk_rkb_s_peak": self.disk / 1024 if read else 0.0,
                "disk_r_s_peak": self.disk / 131072 if read else 0.0,
                "disk_rareq_kb_peak": 128.0 if read else None,
            }
        return figures

    def runs(self, extra: tuple[str, ...] = ()) -> list[Run]:
        return [
            *(self.run(percent) for percent in (*SPLITS, *extra)),
            *(self.run(DISK, batch) for batch in (1, 2, 16, 64)),
            *(self.run(percent, compress=True) for percent in (GPU, DISK)),
            *(self.run(percent, breakdown=True) for percent in (GPU, DISK)),
        ]


def orders(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(math.log10(low), math.log10(high)).map(lambda exponent: 10**exponent)


machines = st.builds(
    Drawn,
    pcie=orders(1e8, 1e11),
    disk=orders(2e7, 2e10),
    page_cache_rate=orders(1e9, 3e10),
    page_cache_bytes=st.just(0.0) | st.floats(0, 4e9),
    launch_s=orders(1e-4, 1e-1),
    compute_s=orders(1e-5, 1e-2),
    dequantize_s=orders(1e-4, 1e-1),
    overlap=st.sampled_from((0.0, 0.3, 0.9, 1.0)),
    in_series=st.booleans(),
    counted=st.booleans(),
)
extra_splits = st.lists(st.sampled_from(EXTRA_SPLITS), unique=True, max_size=3).map(tuple)
left_out = st.sets(st.integers(0, 4), max_size=2)


def within(interval, truth: float) -> bool:
    return interval.low <= truth * EXACT and truth <= interval.high * EXACT


@hypothesis_settings(max_examples=100, deadline=None)
@given(machines, extra_splits, left_out)
def test_the_offload_sweep_contradicts_no_machine(machine, extra, missing):
    runs = [run for i, run in enumerate(machine.runs(extra)) if i not in missing]
    found = readable(analysis.offload_sweep.analyze(runs))
    rates = found.rates
    rows = {row.id: row for step in found.steps for row in (step.before, step.after)}
    for row_id, row in rows.items():
        truth = machine.parts(row.run)
        for name, part in rates.parts[row_id].by_name.items():
            assert within(part, truth[name]), (row.label, name, part, truth)
            assert part.high <= machine.pass_s(row.run) * 1.02
        longest = rates.parts[row_id].longest
        assert longest is None or truth[longest] >= max(truth.values()) / EXACT
    assert rates.pcie is None or within(rates.pcie, machine.pcie)
    if rates.disk_row:
        tier = machine.tier_rate(rates.disk_row.run)
        assert within(rates.disk, tier)
        assert within(rates.pcie_over_disk, machine.pcie / tier)
        assert rates.faster_link is None or machine.pcie > tier
    for step in found.steps:
        before, after = machine.parts(step.before.run), machine.parts(step.after.run)
        assert step.link != "PCIe" or after["PCIe"] > before["PCIe"]
        if step.ratio_at_one_disk_rate is not None:
            assert not machine.cached(rates.disk_row.run)
            assert machine.cached(step.before.run) or machine.cached(step.after.run)
        if step.link == "PCIe" and step.link_s:
            assert within(step.link_s, step.bytes_added / machine.pcie)
    _dominated_passes(machine, found)


def _dominated_passes(machine, found):
    """The sentence that a teacher looks for must hold for every pass it speaks of."""
    if "already dominates" not in found.parts[0].reason:
        return
    for front, back in ((STEPS[0], STEPS[2]), (STEPS[1], STEPS[3])):
        first, second = found.step(*front), found.step(*back)
        if first and second and not first.ratio.is_close_to(second.ratio):
            truth = machine.parts(second.before.run)
            assert truth["Disk"] == max(truth.values())


@hypothesis_settings(max_examples=60, deadline=None)
@given(machines)
def test_the_batches_contradict_no_machine(machine):
    found = readable(analysis.batch_size.analyze(machine.runs()))
    disk = machine.run(DISK)
    parts, whole = machine.parts(disk), machine.pass_s(disk)
    assert found.moving_share.low <= (parts["PCIe"] + parts["Disk"]) / whole * EXACT
    passes = {batch: machine.pass_s(machine.run(DISK, batch)) for batch in (1, 2, 4, 16, 64)}
    if max(passes.values()) > 1.05 * min(passes.values()):
        assert found.computing_may_explain_growth  # nothing else grows on these machines
    if "almost all of every pass" in found.parts[0].reason:
        assert parts["PCIe"] + parts["Disk"] >= 0.85 * whole
    for step in found.steps:
        assert step.grows == (step.ratio.value > 1.02)
        assert step.ratio.value <= step.ideal * EXACT
    if found.growth.compute_overtakes_at:
        computing = machine.launch_s + machine.compute_s * found.growth.compute_overtakes_at
        assert computing <= (parts["PCIe"] + parts["Disk"]) * 1.05


@hypothesis_settings(max_examples=60, deadline=None)
@given(machines)
def test_compression_contradicts_no_machine(machine):
    found = readable(analysis.weight_compression.analyze(machine.runs()))
    assert found.gpu.direction in ("slower", "unchanged")  # dequantization is all that changes there
    before, after = machine.run(DISK), machine.run(DISK, compress=True)
    saved = {name: machine.parts(before)[name] - machine.parts(after)[name] for name in NAMES}
    if found.disk.dominates == "saving":
        assert saved["PCIe"] + saved["Disk"] > 0
    if found.disk.dominates == "cost":
        assert machine.dequantize_s > 0 and not (machine.cached(before) and not machine.cached(after))
    more_cached = machine.cached(after) and not machine.cached(before)
    assert found.disk.page_cache in (None, int(more_cached))
    reason = found.parts[1].reason
    if "reads also got faster" in reason:
        assert more_cached
    if "reading weights is nearly all" in reason:
        truth = machine.parts(before)
        assert truth["PCIe"] + truth["Disk"] >= 0.85 * machine.pass_s(before)


@hypothesis_settings(max_examples=40, deadline=None)
@given(machines)
def test_disk_io_contradicts_no_machine(machine):
    found = readable(analysis.disk_io.analyze(machine.runs()))
    assert found.classes[0].by_rule == ("C" if machine.cached(machine.run(DISK)) else "A")
    assert found.compute_is_the_same and not found.gpu.compute_exceeds_pass
    gpu, disk = machine.run(GPU, breakdown=True), machine.run(DISK, breakdown=True)
    assert math.isclose(found.load_ratio, disk.load_weight_s / gpu.load_weight_s)
    assert machine.page_cache_bytes > 0 or "Page cache served" not in analysis.disk_reads.markdown(machine.runs())


@hypothesis_settings(max_examples=40, deadline=None)
@given(machines, st.floats(1.0, 1.01))
def test_a_little_noise_does_not_make_a_decision(machine, noise):
    """Two rows of the same placement, one measured a little slower: no ratio between them counts."""
    runs = machine.runs()
    slower = runs[1].model_copy(update={"total_throughput_tok_s": runs[1].total_throughput_tok_s / noise})
    found = analysis.offload_sweep.analyze([runs[0], slower, *runs[2:]])
    for row_id, parts in found.rates.parts.items():
        run = next(row.run for step in found.steps for row in (step.before, step.after) if row.id == row_id)
        truth = machine.parts(run)
        assert parts.longest is None or truth[parts.longest] >= 0.97 * max(truth.values())


def test_every_order_of_the_three_parts_is_found_somewhere():
    """The checks above mean something only if answers do decide: each part can come out longest."""
    machine = Drawn(1e10, 1e9, 1e10, 0.0, 1e-3, 1e-4, 1e-3, 1.0, True, True)
    decided = set()
    for pcie, disk, compute in itertools.product((2e8, 5e10), (5e7, 2e10), (1e-5, 1.0)):
        drawn = replace(machine, pcie=pcie, disk=disk, compute_s=compute)
        parts = analysis.offload_sweep.analyze(drawn.runs()).rates.parts
        decided |= {part.longest for part in parts.values()}
    assert decided >= set(NAMES)
