"""One pass as FlexGen's schedule overlaps it: what loads, computes and stores at the same time, layer by layer."""

from __future__ import annotations

from helpers.analysis.values import seconds
from helpers.explorer.drawing import WIDTH_PX, Drawing, note
from helpers.explorer.view import View
from helpers.predict.rates import loads
from helpers.predict.time_model import LayerTimes, layer_times
from helpers.report.plots import BLUE, GREEN, GREY, ORANGE, SKY, VERMILION

LEFT_PX, RIGHT_PX = 98, WIDTH_PX - 12
LANES_PX = {"disk → RAM": 66, "RAM → GPU": 100, "GPU computes": 134, "GPU → RAM": 168}
NAMES = {"attention": "attention", "mlp": "MLP"}
CPU_WEIGHTS, DISK_WEIGHTS, COMPUTE, CACHE = ORANGE, GREEN, BLUE, SKY


class OverlapPicture(Drawing):
    """Two transformer blocks in the middle of a decode pass."""

    height_px = 300

    def lay_out(self) -> None:
        for name, y in LANES_PX.items():
            self.page.text(LEFT_PX - 8, y, name, fontsize=8, ha="right", va="center")
            self.page.plot([LEFT_PX, RIGHT_PX], [y + 14, y + 14], color="#e0e0e0", linewidth=0.8)
        self.page.text(LEFT_PX - 8, 43, "layer", fontsize=8, ha="right", va="center")

    def frame(self, view: View) -> str:
        return view.aside

    def set_frame(self, aside: str) -> None:
        self.title(f"Two blocks of a decode pass{aside}")

    def paint(self, view: View) -> None:
        first, attention, mlp, last = layer_times(view.settings, view.profile)
        self._scale_px_s = (RIGHT_PX - LEFT_PX) / (2 * (attention.layer_s + mlp.layer_s))
        start_s = 0.0
        for layer in (attention, mlp, attention, mlp):
            self._paint_layer(layer, start_s, view.settings.overlap)
            start_s += layer.layer_s
        self._mark(start_s)
        blocks = view.settings.opt_model.num_layers
        self.text(LEFT_PX, 192, "0", ha="center", fontsize=7)
        self.text(RIGHT_PX, 192, seconds(start_s), ha="right", fontsize=7)
        self._paint_legend()
        for line, words in enumerate(_why(attention, mlp, view.settings.overlap)):
            self.text(6, 230 + 15 * line, words)
        block_s, embeddings_s = attention.layer_s + mlp.layer_s, first.layer_s + last.layer_s
        words = f"A decode pass: {blocks} blocks of {seconds(block_s)}, embeddings {seconds(embeddings_s)}"
        self.text(6, 260, f"{words}: {seconds(blocks * block_s + embeddings_s)}.")
        self._paint_measured(view, attention, mlp)

    def _paint_layer(self, layer: LayerTimes, start_s: float, overlap: bool) -> None:
        self._mark(start_s)
        width_px = layer.layer_s * self._scale_px_s
        if width_px > 50:
            words = f"{NAMES[layer.kind]} {seconds(layer.layer_s)}" if width_px > 96 else NAMES[layer.kind]
            self.text(self._x(start_s + layer.layer_s / 2), 43, words, ha="center")
        from_disk_s = max(layer.disk_s, layer.cpu_to_gpu_s)  # what was read crosses after what was there already
        loaded_s = from_disk_s + layer.disk_to_gpu_s
        computing_s = start_s if overlap else start_s + loaded_s + layer.cache_load_s
        pcie = LANES_PX["RAM → GPU"]
        self._step(start_s, layer.disk_s, LANES_PX["disk → RAM"], DISK_WEIGHTS)
        self._step(start_s, layer.cpu_to_gpu_s, pcie, CPU_WEIGHTS)
        self._step(start_s + from_disk_s, layer.disk_to_gpu_s, pcie, DISK_WEIGHTS)
        self._step(start_s + (0 if overlap else loaded_s), layer.cache_load_s, pcie + 9, CACHE, height=6)
        self._step(computing_s, layer.compute_s, LANES_PX["GPU computes"], COMPUTE)
        storing_s = start_s if overlap else computing_s + layer.compute_s
        self._step(storing_s, layer.cache_store_s, LANES_PX["GPU → RAM"], CACHE)

    def _step(self, start_s: float, length_s: float, y: float, colour: str, height: float = 16) -> None:
        if length_s > 0:
            width = max(length_s * self._scale_px_s, 1.0)
            self.bar(self._x(start_s), y, width, height, colour)
            if width > 46 and height > 10:
                self.text(self._x(start_s) + width / 2, y, seconds(length_s), ha="center", color="white", fontsize=7)

    def _mark(self, at_s: float) -> None:
        self.line([self._x(at_s)] * 2, [52, 182], color=GREY, linewidth=0.8, linestyle=":")

    def _x(self, at_s: float) -> float:
        return LEFT_PX + at_s * self._scale_px_s

    def _paint_legend(self) -> None:
        x = 8.0
        for words, colour in (
            ("weights from disk", DISK_WEIGHTS),
            ("weights from RAM", CPU_WEIGHTS),
            ("computing", COMPUTE),
            ("KV cache", CACHE),
        ):
            self.bar(x, 211, 9, 9, colour)
            self.text(x + 13, 211, words)
            x += 134

    def _paint_measured(self, view: View, attention: LayerTimes, mlp: LayerTimes) -> None:
        """FlexGen's own timers of a breakdown run (no overlap), with the same two figures predicted."""
        run = view.breakdown
        if run is None or not run.load_weight_s:
            note(self, 6, 282, "Measured: no breakdown run of this setting is in the log; notebook 04 makes two.")
            return
        words = (
            f"load {seconds(run.load_weight_s)} (predicted {seconds(loads(view.settings, view.profile).block_s / 2)})"
        )
        if run.compute_layer_decoding_s:
            computing_s = (attention.compute_s + mlp.compute_s) / 2
            words += f", compute {seconds(run.compute_layer_decoding_s)} (predicted {seconds(computing_s)})"
        self.diamond(12, 282)
        self.text(22, 282, f"A layer, {run.kind} (breakdown): {words}.", color=VERMILION, fontsize=7)


def _why(attention: LayerTimes, mlp: LayerTimes, overlap: bool) -> list[str]:
    """What each block waits for, and what hides behind it."""
    lanes = {
        "reading from disk": attention.disk_s + mlp.disk_s,
        "copying weights from RAM": attention.cpu_to_gpu_s + mlp.cpu_to_gpu_s,
        "computing": attention.compute_s + mlp.compute_s,
        "moving the KV cache": attention.cache_load_s + attention.cache_store_s,
    }
    longest, *others = sorted((name for name in lanes if lanes[name] > 0), key=lambda name: -lanes[name])
    if not overlap:
        return [f"Without overlap all of it adds up; the longest is {longest}, {seconds(lanes[longest])} a block."]
    words = [f"A block waits for {longest}: {seconds(lanes[longest])}."]
    copied_s = attention.disk_to_gpu_s + mlp.disk_to_gpu_s
    if longest == "reading from disk" and copied_s > 0.05 * lanes[longest]:
        words[0] = f"{words[0][:-1]}, then for its copy to the GPU: {seconds(copied_s)}."
    if others:
        hidden = " and ".join(f"{name} ({seconds(lanes[name])})" for name in others[:2])
        words.append(f"{hidden[0].upper()}{hidden[1:]} {'hides' if len(others) == 1 else 'hide'} behind it.")
    return words
