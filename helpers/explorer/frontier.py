"""FlexGen's latency-throughput frontier: no other split or batch is faster without a longer wait."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from helpers.analysis.values import plain, seconds
from helpers.explorer.bench import once
from helpers.explorer.drawing import Drawing, decades_around, note
from helpers.explorer.split_map import with_split
from helpers.explorer.view import View, without_batch, without_split
from helpers.machine.profiles import MachineProfile
from helpers.predict.batch_bound import largest_batch_bounds
from helpers.predict.search import BATCH_COUNTS, BATCH_SIZES, all_placements, fits, with_batch
from helpers.predict.time_model import fastest_latencies
from helpers.report.plots import BLUE, GREY, VERMILION
from helpers.settings import RunSettings


@dataclass(frozen=True, eq=False)
class Frontier:
    """Seconds of a generation and token/s of every split and batch that may fit, and the settings on the frontier,
    the shortest wait first."""

    latency_s: NDArray[np.float64]
    tok_s: NDArray[np.float64]
    best: tuple[tuple[float, float, RunSettings], ...]


def frontier(settings: RunSettings, profile: MachineProfile) -> Frontier:
    """The frontier over all splits of the weights and batches up to 1024 x 8, all else as in `settings`."""
    return _frontier(without_batch(without_split(once(settings))), profile)


@lru_cache(maxsize=16)
def _frontier(settings: RunSettings, profile: MachineProfile) -> Frontier:
    splits = all_placements(settings.opt_model)
    families = [with_split(settings, *split) for split in splits]
    gpu_bytes = profile.usable_gpu_bytes - profile.cublas_workspace_bytes
    largest = largest_batch_bounds(settings, splits, BATCH_COUNTS, gpu_bytes, profile.usable_host_bytes)
    shape = (len(families), len(BATCH_SIZES), len(BATCH_COUNTS))
    sizes = np.broadcast_to(np.array(BATCH_SIZES).reshape(1, -1, 1), shape)
    latency_s = fastest_latencies(settings, profile, splits, sizes, BATCH_COUNTS)
    tok_s = sizes * np.array(BATCH_COUNTS) * settings.workload.gen_len / latency_s
    possible = sizes <= largest[:, None, :]
    where, latency_s, tok_s = np.argwhere(possible), latency_s[possible], tok_s[possible]
    best: list[tuple[float, float, RunSettings]] = []
    fastest = 0.0
    for i in np.lexsort((-tok_s, latency_s)).tolist():  # the shortest wait first; of equal ones, the most tokens
        if tok_s[i] <= fastest * 1.001:
            continue
        placement, size, count = where[i].tolist()
        one = with_batch(families[placement], BATCH_SIZES[size], BATCH_COUNTS[count])
        if fits(one, profile):
            fastest = float(tok_s[i])
            best.append((float(latency_s[i]), fastest, one))
    return Frontier(latency_s, tok_s, tuple(best))


class FrontierPicture(Drawing):
    height_px = 300

    def lay_out(self) -> None:
        self.axes = self.add_log_axes("seconds until all tokens are there (log scale)")

    def frame(self, view: View) -> tuple[str, tuple[float, float], tuple[float, float]]:
        found = frontier(view.settings, view.profile)
        here = view.prediction
        latencies = np.append(found.latency_s, here.total_latency_s)
        speeds = np.append(found.tok_s, here.total_throughput_tok_s)
        return (
            view.aside,
            decades_around(float(latencies.min()) / 1.2, float(latencies.max()) * 1.2),
            decades_around(float(speeds.min()) / 1.2, float(speeds.max()) * 1.2),
        )

    def set_frame(self, frame: tuple[str, tuple[float, float], tuple[float, float]]) -> None:
        aside, latencies, speeds = frame
        self.title(f"Token/s by wait, every split and batch that fits{aside}")
        self.axes.set(xlim=latencies, ylim=speeds)

    def paint(self, view: View) -> None:
        found = frontier(view.settings, view.profile)
        self.line(found.latency_s, found.tok_s, self.axes, color="#a9bccb", marker=".", markersize=2, linestyle="none")
        if found.best:
            waits, speeds, _ = zip(*found.best)
            self.line(waits, speeds, self.axes, color=BLUE, linewidth=2, marker="o", markersize=3.5)
            self._paint_names(found)
        measured = view.measured_like(lambda settings: without_batch(without_split(settings)))
        for settings, tok_s in measured:
            self.diamond(settings.workload.generated_tokens / tok_s.value, tok_s.value, self.axes)
        here = view.prediction
        self.here(here.total_latency_s, here.total_throughput_tok_s, self.axes)
        words = f"this setting: {plain(here.total_throughput_tok_s)} token/s in {seconds(here.total_latency_s)}"
        gap = _gap(found, here.total_latency_s, here.total_throughput_tok_s)
        colour = VERMILION if view.why_not else "black"
        self.label(0.985, 0.13, words, self.axes, transform=self.axes.transAxes, ha="right", color=colour)
        said = "it does not fit" if view.why_not else gap
        self.label(0.985, 0.06, said, self.axes, transform=self.axes.transAxes, ha="right", color=GREY)
        if not found.best:
            note(self, 70, 40, "no split fits this machine, whatever the batch")

    def _paint_names(self, found: Frontier) -> None:
        """The split and batch of the ends and of a point between them."""
        for place in sorted({0, len(found.best) // 2, len(found.best) - 1}):
            wait, speed, one = found.best[place]
            work, split = one.workload, one.split
            words = f"{split.weights_gpu} {split.weights_cpu}, batch {work.gpu_batch_size} x {work.num_gpu_batches}"
            at_right = place > 0 and place == len(found.best) - 1
            x, y = self.axes.transData.transform((wait, speed))
            page_x, page_y = self.page.transData.inverted().transform((x, y))
            self.label(
                page_x + (-8 if at_right else 8),
                max(page_y + (-9 if at_right else 9), 30),
                words,
                ha="right" if at_right else "left",
                color=BLUE,
            )


def _gap(found: Frontier, latency_s: float, tok_s: float) -> str:
    """How far a setting is below the frontier at its latency."""
    within = [speed for wait, speed, _ in found.best if wait <= latency_s * 1.001]
    if not within or max(within) <= tok_s * 1.02:
        return "on the frontier"
    return f"within this wait, {plain(max(within) / tok_s, 2)} times as many are possible"
