"""What a run is: the offload split, the workload and every FlexGen option, refused here if wrong."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from helpers import models
from helpers.errors import Refused

Percent = Annotated[int, Field(ge=0, le=100)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]  # far over what any machine holds: a slip

# FlexGen's one benchmark sentence is 7 tokens; it pads shorter prompts and cannot cut longer ones.
SHORTEST_PROMPT = 7


class Frozen(BaseModel):
    """A value: no field can be changed, added or coerced."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise Refused(in_one_line(error)) from None

    # Pydantic then reads JSON without coming through here, where strict mode refuses arrays as tuples.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


def in_one_line(error: ValidationError) -> str:
    """The first complaint of pydantic as `field=value: rule`; Refused raised inside keeps its words."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    text = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return text
    rule = text[0].lower() + text[1:]
    if first["type"] == "json_invalid":  # the input is the whole line, and the place is in that
        return re.sub(r" at line \d+ column \d+$", "", rule)
    return f"{where}{'=' if where else ''}{first['input']!r:.100}: {rule}"


class OffloadSplit(Frozen):
    """FlexGen's six `--percent` numbers; what is on neither GPU nor CPU is on disk."""

    weights_gpu: Percent
    weights_cpu: Percent
    cache_gpu: Percent = 100
    cache_cpu: Percent = 0
    activations_gpu: Percent = 100
    activations_cpu: Percent = 0

    @classmethod
    def parse(cls, numbers: Sequence[str | int] | str) -> OffloadSplit:
        """A split from `"50 50 100 0 100 0"`, or from six numbers. Raises Refused naming the number."""
        parts = numbers.split() if isinstance(numbers, str) else list(numbers)
        if len(parts) != 6:
            given = " ".join(map(str, parts))
            apart = ", separated by spaces" if "," in given else ""
            raise Refused(
                f"--percent {given}: {len(parts)} number{'' if len(parts) == 1 else 's'}, FlexGen takes 6{apart} "
                "(weights, cache, activations: GPU and CPU share of each)"
            )
        whole = []
        for part in parts:
            if isinstance(part, bool) or not re.fullmatch(r"[+-]?[0-9]{1,9}", str(part).strip()):
                raise Refused(f"--percent {part}: not a whole number, FlexGen takes whole percentages")
            number = int(part)
            if not 0 <= number <= 100:
                raise Refused(f"--percent {number}: outside 0 to 100")
            whole.append(number)
        return cls(
            weights_gpu=whole[0],
            weights_cpu=whole[1],
            cache_gpu=whole[2],
            cache_cpu=whole[3],
            activations_gpu=whole[4],
            activations_cpu=whole[5],
        )

    @model_validator(mode="after")
    def _shares_add_up(self) -> OffloadSplit:
        for what, gpu, cpu in self._pairs():
            if gpu + cpu > 100:
                raise ValueError(
                    f"--percent {gpu} {cpu} ({what}): {gpu} + {cpu} = {gpu + cpu} is over 100, "
                    "the GPU and CPU share may add up to 100 at most"
                )
        gpu, cpu = self.activations_gpu, self.activations_cpu
        if (gpu, cpu) not in ((100, 0), (0, 100), (0, 0)):
            raise ValueError(
                f"--percent {gpu} {cpu} (activations): FlexGen cannot split activations, "
                "take 100 0 (GPU), 0 100 (CPU) or 0 0 (disk)"
            )
        return self

    def _pairs(self) -> tuple[tuple[str, int, int], ...]:
        return (
            ("weights", self.weights_gpu, self.weights_cpu),
            ("cache", self.cache_gpu, self.cache_cpu),
            ("activations", self.activations_gpu, self.activations_cpu),
        )

    @property
    def weights_disk(self) -> int:
        return 100 - self.weights_gpu - self.weights_cpu

    @property
    def cache_disk(self) -> int:
        return 100 - self.cache_gpu - self.cache_cpu

    @property
    def cache_is_mixed(self) -> bool:
        return 100 not in (self.cache_gpu, self.cache_cpu, self.cache_disk)

    @property
    def percent(self) -> tuple[int, int, int, int, int, int]:
        return (
            self.weights_gpu,
            self.weights_cpu,
            self.cache_gpu,
            self.cache_cpu,
            self.activations_gpu,
            self.activations_cpu,
        )

    def __str__(self) -> str:
        return " ".join(map(str, self.percent))


class Workload(Frozen):
    """What is generated: sequences in a micro-batch, micro-batches, prompt and generated tokens."""

    gpu_batch_size: Count = 4
    num_gpu_batches: Count = 1
    prompt_len: Annotated[int, Field(ge=SHORTEST_PROMPT)] = 128
    gen_len: Count = 16

    @property
    def effective_batch(self) -> int:
        """Sequences generated together; `num_gpu_batches` counts micro-batches, not GPUs."""
        return self.gpu_batch_size * self.num_gpu_batches

    @property
    def generated_tokens(self) -> int:
        return self.effective_batch * self.gen_len


class RunSettings(Frozen):
    """Everything about one run. Two equal settings are the same run.

    Raises Refused, in one line with the value and the rule, for what FlexGen would crash on late,
    or silently run as something else.
    """

    model: str
    split: OffloadSplit
    workload: Workload = Workload()
    device: Literal["cuda", "emulated"]
    compress_weight: bool = False
    compress_cache: bool = False
    overlap: bool = True
    pin_weight: bool = True
    cpu_cache_compute: bool = False
    attn_sparsity: Annotated[float, Field(gt=0, le=1)] = 1.0
    debug_mode: Literal["breakdown", "fewer_batch"] | None = None
    page_cache: Literal["natural", "cold"] = "natural"
    disk_reader: Literal["stock", "direct"] = "stock"
    copy_buffer: Literal["stock", "fit"] = "stock"
    repeats: Count = 3

    @field_validator("model")
    @classmethod
    def _name_as_flexgen_spells_it(cls, name: str) -> str:
        folder = models.local_folder(name)
        if folder or models.is_remembered(name):
            return str(folder or name)
        return models.resolve(name).name

    @model_validator(mode="after")
    def _flexgen_can_run_it(self) -> RunSettings:
        model, work = self.opt_model, self.workload
        length = work.prompt_len + work.gen_len
        if length > model.max_positions:
            raise ValueError(
                f"prompt_len {work.prompt_len} + gen_len {work.gen_len} = {length}: "
                f"{model.name} has {model.max_positions} positions"
            )
        if self.compress_cache and self.split.cache_is_mixed:
            raise ValueError(
                f"--percent {self.split} with --compress-cache: FlexGen cannot compress a KV cache "
                "split over tiers, put all of it on one (third and fourth number)"
            )
        if self.compress_cache and self.attn_sparsity < 1:
            raise ValueError(
                f"--attn-sparsity {self.attn_sparsity} with --compress-cache: FlexGen implements "
                "sparse attention on an uncompressed KV cache only"
            )
        if self.split.cache_is_mixed and self.attn_sparsity < 1:
            raise ValueError(
                f"--attn-sparsity {self.attn_sparsity} with --percent {self.split}: FlexGen "
                "implements sparse attention with the KV cache on one tier only"
            )
        decode_steps = (work.gen_len - 1) * len(model.layers)
        if self.debug_mode and decode_steps <= 10:
            raise ValueError(
                f"gen_len {work.gen_len} with --debug-mode {self.debug_mode}: {decode_steps} decode "
                "layer-steps, FlexGen's timers skip the first 10; generate more tokens"
            )
        return self

    @property
    def opt_model(self) -> models.OptModel:
        return models.resolve(self.model)

    @property
    def key(self) -> str:
        """A short name for exactly these settings: 12 hexadecimal digits."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]

    def flexgen_arguments(
        self, weights: str = "~/opt_weights", offload_dir: str = "~/flexgen_offload_dir"
    ) -> list[str]:
        """FlexGen's own command line for this run, as one would type it."""
        model = self.opt_model.name
        arguments = [
            "python",
            "-m",
            "flexgen.flex_opt",
            "--model",
            model if "/" in model else f"facebook/{model}",
            "--path",
            weights,
            "--offload-dir",
            offload_dir,
            "--prompt-len",
            str(self.workload.prompt_len),
            "--gen-len",
            str(self.workload.gen_len),
            "--gpu-batch-size",
            str(self.workload.gpu_batch_size),
            "--num-gpu-batches",
            str(self.workload.num_gpu_batches),
            "--percent",
            *str(self.split).split(),
        ]
        if self.compress_weight:
            arguments.append("--compress-weight")
        if self.compress_cache:
            arguments.append("--compress-cache")
        if self.cpu_cache_compute:
            arguments.append("--cpu-cache-compute")
        if not self.overlap:
            arguments += ["--overlap", "false"]
        if not self.pin_weight:
            arguments += ["--pin-weight", "false"]
        if self.attn_sparsity < 1:
            arguments += ["--attn-sparsity", str(self.attn_sparsity)]
        if self.debug_mode:
            arguments += ["--debug-mode", self.debug_mode]
        return arguments

    @property
    def flexgen_command(self) -> str:
        """FlexGen's command line, to paste into a shell; a comment says what of this run FlexGen does not have."""
        # The shell finds the home folder for a tilde that is not quoted.
        words = (word if word.startswith("~/") else shlex.quote(word) for word in self.flexgen_arguments())
        model = self.opt_model
        own = model in models.SYNTHETIC_MODELS or (
            models.local_folder(self.model) and model not in models.KNOWN_MODELS.values()
        )
        notes = [f"FlexGen has no model {model.name}, which is of this laboratory; take another for it"] if own else []
        beside = {
            "--device emulated": self.device == "emulated",
            "--page-cache cold": self.page_cache == "cold",
            "--disk-reader direct": self.disk_reader == "direct",
            "--copy-buffer fit": self.copy_buffer == "fit",
        }
        flags = " ".join(flag for flag, is_set in beside.items() if is_set)
        if flags:
            notes.append(f"run with {flags}, which python -m helpers measure has and FlexGen does not")
        return " ".join(words) + (f"  # {'; '.join(notes)}" if notes else "")
