"""The bars under every picture: where the weights are, what memory holds, what a pass waits for, how fast it is."""

from __future__ import annotations

import math

from helpers.analysis.values import Value, plain, seconds
from helpers.explorer.drawing import WIDTH_PX, Drawing, decade, decades_around, note, place_on_log
from helpers.explorer.view import MemoryUse, View, bytes_in_words
from helpers.placement import Tier
from helpers.report.plots import BLUE, GREEN, GREY, ORANGE, SKY, VERMILION

TIER_COLOURS: dict[Tier, str] = {"gpu": BLUE, "cpu": ORANGE, "disk": GREEN}
TIER_NAMES: dict[Tier, str] = {"gpu": "GPU", "cpu": "CPU", "disk": "disk"}
PART_COLOURS = (BLUE, ORANGE, GREEN, SKY)
TERMS_SHOWN = 4
RIGHT_PX = 304  # where the right half begins
SPEED_PX = (RIGHT_PX + 64, WIDTH_PX - 14)  # the ends of the throughput scale


class Summary(Drawing):
    height_px = 226

    def lay_out(self) -> None:
        pass

    def frame(self, view: View) -> str:
        return view.aside

    def set_frame(self, aside: str) -> None:
        self.title("Weights: asked (pale) and achieved")
        self.title(f"Memory needed{aside}", y=95)
        self.title(f"Pass{aside}", RIGHT_PX)
        self.title(f"Token/s{aside}", RIGHT_PX, 126)

    def paint(self, view: View) -> None:
        self._paint_weights(view)
        self._paint_memory(view.gpu, 112)
        self._paint_memory(view.host, 172)
        self._paint_parts(view)
        self._paint_speed(view)

    def _paint_weights(self, view: View) -> None:
        full_px = 84
        for row, (tier, share) in enumerate(view.weights.items()):
            y = 31 + 21 * row
            self.text(34, y, TIER_NAMES[tier], ha="right")
            self.bar(40, y - 5, full_px * share.asked_percent / 100, 6, TIER_COLOURS[tier], alpha=0.4)
            self.bar(40, y + 3, full_px * share.achieved_percent / 100, 9, TIER_COLOURS[tier])
            achieved = f"{share.achieved_percent:.1f} % = {bytes_in_words(share.achieved_bytes)}"
            self.text(40 + full_px + 6, y, f"{share.asked_percent} % → {achieved}")

    def _paint_memory(self, memory: MemoryUse, y: float) -> None:
        """The memory needed and available, a bar of its parts, and their names under it."""
        need, most = bytes_in_words(memory.need_bytes), bytes_in_words(memory.most_bytes)
        said = (
            f"{memory.name}: {need if most == need else f'{need} to {most}'} of {bytes_in_words(memory.capacity_bytes)}"
        )
        colour = "black" if memory.fits else VERMILION
        self.text(6, y, said if memory.fits else f"{said}: does not fit", color=colour)
        full_px, left, bar_y = 240.0, 6.0, y + 13
        self.bar(left, bar_y, full_px, 9, "#e8e8e8")
        for rank, (name, size) in enumerate(_named(memory.parts).items()):
            right = min(left + full_px * size / memory.capacity_bytes, 286.0)
            self.bar(left, bar_y, right - left, 9, PART_COLOURS[rank])
            left = right
            x, legend_y = 6 + 146 * (rank % 2), y + 27 + 13 * (rank // 2)
            self.bar(x, legend_y, 7, 7, PART_COLOURS[rank])
            self.text(
                x + 11, legend_y, f"{name if len(name) < 20 else name[:18] + '…'} {bytes_in_words(size, 2)}", fontsize=7
            )
        end = 6 + full_px
        self.line([end, end], [bar_y - 7, bar_y + 7], color="black", linewidth=1.2)

    def _paint_parts(self, view: View) -> None:
        parts = view.parts_of_a_pass_s
        shown = {"the pass": view.pass_s, **dict(list(parts.items())[:TERMS_SHOWN])}
        high = decade(math.ceil, 1.5 * max(shown.values()))
        left, full_px = RIGHT_PX + 98.0, 80.0
        for row, (name, time_s) in enumerate(shown.items()):
            y = 31 + 18 * row
            width = max(full_px * place_on_log(time_s, high / 1e4, high), 2.0)
            self.text(left - 6, y, name, ha="right")
            self.bar(left, y, width, 11, (GREY, VERMILION)[row] if row < 2 else SKY)
            self.text(left + width + 6, y, seconds(time_s))

    def _paint_speed(self, view: View) -> None:
        predicted, measured = view.prediction, view.measured_tok_s
        low, high = predicted.total_throughput_tok_s_bounds
        ends = decades_around(
            min(low, measured.low if measured else low), max(high, measured.high if measured else high)
        )
        left, right = SPEED_PX
        self.line([left, right], [204, 204], color="#bbbbbb", linewidth=0.8)
        for power in range(round(math.log10(ends[0])), round(math.log10(ends[1])) + 1):
            x = self._speed_x(10.0**power, ends)
            self.line([x, x], [201, 207], color="#bbbbbb", linewidth=0.8)
            self.text(x, 215, plain(10.0**power, 1), ha="center", fontsize=7)
        value = Value(predicted.total_throughput_tok_s, low, high)
        said = plain(value.value) + (" if it fitted" if view.why_not else "")
        self._paint_interval("predicted", 156, value, ends, GREY if view.why_not else BLUE, "o", said)
        if measured and view.run:
            quoted = " (quoted)" if view.run.kind == "quoted" else ""
            said = f"{plain(measured.value)}{quoted}, predicted {view.off_by}"
            self._paint_interval("measured", 188, measured, ends, VERMILION, "D", said)
        else:
            self.text(left - 8, 188, "measured", ha="right")
            note(self, left, 188, "not if hypothetical" if view.state.what_if else "not yet")

    def _paint_interval(
        self, name: str, y: float, value: Value, ends: tuple[float, float], colour: str, marker: str, said: str
    ) -> None:
        low, middle, high = (self._speed_x(v, ends) for v in (value.low, value.value, value.high))
        self.text(SPEED_PX[0] - 8, y, name, ha="right")
        self.line([low, high], [y, y], color=colour, linewidth=2, marker="|", markersize=9)
        self.line([middle], [y], color=colour, marker=marker, markersize=7)
        half_px = 2.9 * len(said)  # keep it within the picture
        self.text(min(max(middle, RIGHT_PX + half_px), WIDTH_PX - 4 - half_px), y - 12, said, ha="center")

    def _speed_x(self, tok_s: float, ends: tuple[float, float]) -> float:
        left, right = SPEED_PX
        return left + (right - left) * place_on_log(tok_s, *ends)


def _named(parts: dict[str, float]) -> dict[str, float]:
    """The largest parts, and the others together."""
    ranked = dict(sorted(parts.items(), key=lambda part: -part[1]))
    most = len(PART_COLOURS)
    if len(ranked) <= most:
        return ranked
    others = sum(list(ranked.values())[most - 1 :])
    return {**dict(list(ranked.items())[: most - 1]), "other": others}
