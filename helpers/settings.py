"""Run settings: the offload split, the workload and every option. Values that cannot work are refused here."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from helpers import models, options
from helpers.errors import Refused
from helpers.options import Option

Percent = Annotated[int, Field(ge=0, le=100)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]  # anything above is a typo: no machine could hold it

# FlexGen's one benchmark sentence is 7 tokens; it pads shorter prompts and cannot cut longer ones.
SHORTEST_PROMPT = 7


class Frozen(BaseModel):
    """An immutable value: no field can be changed, added or coerced."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise Refused(in_one_line(error)) from None

    # Lets pydantic read JSON without calling __init__, where strict mode would refuse arrays for tuples.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


def in_one_line(error: ValidationError) -> str:
    """Pydantic's first complaint as `field=value: rule`; a Refused raised by a validator keeps its text."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    text = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return text
    rule = text[0].lower() + text[1:]
    if first["type"] == "json_invalid":  # the input is the whole line, which the caller names
        return re.sub(r" at line \d+ column \d+$", "", rule)
    return f"{where}{'=' if where else ''}{first['input']!r:.100}: {rule}"


class OffloadSplit(Frozen):
    """FlexGen's six `--percent` numbers. Whatever is on neither GPU nor CPU is on disk."""

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

    @property
    def in_words(self) -> str:
        """Where the weights are: "50 % GPU + 50 % disk"."""
        tiers = ((self.weights_gpu, "GPU"), (self.weights_cpu, "CPU"), (self.weights_disk, "disk"))
        return " + ".join(f"{share} % {tier}" for share, tier in tiers if share)

    def __str__(self) -> str:
        return " ".join(map(str, self.percent))


class Workload(Frozen):
    """The amount of work: sequences per micro-batch, micro-batches, prompt and generated tokens."""

    gpu_batch_size: Annotated[Count, Option("--gpu-batch-size", "sequences per micro-batch", always=True)] = 4
    num_gpu_batches: Annotated[
        Count,
        Option(
            "--num-gpu-batches", "micro-batches (not GPUs); the batch is the product", "x {} micro-batches", always=True
        ),
    ] = 1
    prompt_len: Annotated[
        int, Field(ge=SHORTEST_PROMPT), Option("--prompt-len", "prompt tokens per sequence", always=True)
    ] = 128
    gen_len: Annotated[Count, Option("--gen-len", "generated tokens per sequence", always=True)] = 16

    @property
    def effective_batch(self) -> int:
        """Sequences generated together; `num_gpu_batches` counts micro-batches, not GPUs."""
        return self.gpu_batch_size * self.num_gpu_batches

    @property
    def generated_tokens(self) -> int:
        return self.effective_batch * self.gen_len


class RunSettings(Frozen):
    """Everything about one run. Two equal settings are the same run.

    Raises Refused, in one line with the value and the rule, for settings that FlexGen would crash on late or silently
    run as something else. A model folder's shape is read once, here; a record passes the shape it kept as validation
    context, `{"model_shape": OptModel}`, and then needs no folder.
    """

    model: Annotated[str, Option("--model", "a model FlexGen knows, or a folder with an OPT model", always=True)]
    split: Annotated[
        OffloadSplit,
        Option("--percent", "GPU and CPU share of weights, KV cache and activations; the rest is on disk", always=True),
    ]
    workload: Workload = Workload()
    device: Annotated[Literal["cuda", "emulated"], Option("--device", "the GPU that runs it", flexgen=False)]
    compress_weight: Annotated[bool, Option("--compress-weight", "4-bit weights", "4-bit weights")] = False
    compress_cache: Annotated[bool, Option("--compress-cache", "4-bit KV cache", "4-bit KV cache")] = False
    overlap: Annotated[bool, Option("--overlap", "overlap copies with computing", "no overlap")] = True
    pin_weight: Annotated[bool, Option("--pin-weight", "pin weights that stay on the CPU", "weights not pinned")] = True
    cpu_cache_compute: Annotated[
        bool, Option("--cpu-cache-compute", "compute attention on the CPU", "attention on the CPU")
    ] = False
    attn_sparsity: Annotated[
        float, Field(gt=0, le=1), Option("--attn-sparsity", "share of the KV cache to attend to", "sparsity {}")
    ] = 1.0
    debug_mode: Annotated[
        Literal["breakdown", "fewer_batch"] | None,
        Option("--debug-mode", "time 20 layer-steps, project the rest", "{}"),
    ] = None
    page_cache: Annotated[
        Literal["natural", "cold"],
        Option("--page-cache", "cold: drop cached weights before each pass", "page cache dropped", flexgen=False),
    ] = "natural"
    disk_reader: Annotated[
        Literal["stock", "direct"],
        Option(
            "--disk-reader", "direct: read weights with O_DIRECT, past the page cache", "direct reader", flexgen=False
        ),
    ] = "stock"
    copy_buffer: Annotated[
        Literal["stock", "fit"],
        Option(
            "--copy-buffer",
            "stock: 8 GiB, pinned; fit: the largest tensor's size",
            "fitted copy buffers",
            flexgen=False,
        ),
    ] = "stock"
    repeats: Annotated[
        Count, Option("--repeats", "how often to measure; fewer once that took a minute", flexgen=False)
    ] = 3
    _opt_model: models.OptModel = PrivateAttr()

    @classmethod
    def of(cls, **values: Any) -> RunSettings:
        """Settings from flat values, the workload's next to the others. Raises Refused."""
        workload = {name: values.pop(name) for name in Workload.model_fields if name in values}
        return cls(workload=Workload(**workload), **values)

    def replace(self, **values: Any) -> RunSettings:
        """The same run with other values of some options, validated anew. Raises Refused."""
        return self.of(**(options.columns(self) | values))

    @field_validator("model")
    @classmethod
    def _name_as_flexgen_spells_it(cls, name: str, info: ValidationInfo) -> str:
        if info.context and info.context.get("model_shape"):
            return name
        if info.mode == "json":  # a record's model name is final, whatever folder has that name today
            return name if os.path.isabs(name) else models.by_name(name).name
        return str(models.local_folder(name) or models.resolve(name).name)

    def model_post_init(self, context: Any) -> None:
        shape = (context or {}).get("model_shape")
        self._opt_model = shape or (models.resolve if os.path.isabs(self.model) else models.by_name)(self.model)

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
        """The model's shape when these settings were created."""
        return self._opt_model

    @property
    def key(self) -> str:
        """A short name for exactly these settings: 12 hexadecimal digits."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]

    def flexgen_arguments(
        self, weights: str = "~/opt_weights", offload_dir: str = "~/flexgen_offload_dir"
    ) -> list[str]:
        """FlexGen's own command line for this run, as typed in a shell."""
        name = self.opt_model.name
        model = name if "/" in name else f"facebook/{name}"
        command = [
            "python",
            "-m",
            "flexgen.flex_opt",
            "--model",
            model,
            "--path",
            weights,
            "--offload-dir",
            offload_dir,
        ]
        for one in options.declared(RunSettings):
            if one.option.flexgen and one.name != "model" and (one.option.always or not one.is_default_in(self)):
                command += one.arguments(self)
        return command

    @property
    def flexgen_command(self) -> str:
        """FlexGen's command line, to paste into a shell. A comment lists the options that FlexGen lacks."""
        # The shell finds the home folder only for a tilde that is not quoted.
        words = (word if word.startswith("~/") else shlex.quote(word) for word in self.flexgen_arguments())
        model = self.opt_model
        own = model in models.SYNTHETIC_MODELS or (
            os.path.isabs(self.model) and model not in models.KNOWN_MODELS.values()
        )
        notes = [f"{model.name} exists in this lab only; FlexGen needs another model"] if own else []
        flags = [
            " ".join(one.arguments(self))
            for one in options.declared(RunSettings)
            if not one.option.flexgen and one.name != "repeats" and self._flexgen_lacks(one)
        ]
        if flags:
            notes.append(f"run with {' '.join(flags)}, which python -m helpers measure has and FlexGen does not")
        return " ".join(words) + (f"  # {'; '.join(notes)}" if notes else "")

    def _flexgen_lacks(self, one: options.Declared) -> bool:
        return self.device == "emulated" if one.name == "device" else not one.is_default_in(self)

    @property
    def other_options(self) -> str:
        """Flags not at their defaults that make runs incomparable and have no table column of their own."""
        own_column = ("compress_weight", "debug_mode", "page_cache")
        return " ".join(
            " ".join(one.arguments(self))
            for one in options.declared(RunSettings)
            if not one.option.always
            and one.name not in ("device", "repeats", *own_column)
            and not one.is_default_in(self)
        )

    @property
    def in_words(self) -> str:
        """The split, the batch and the options that are not at their defaults."""
        return ", ".join((self.split.in_words, f"batch {self.workload.gpu_batch_size}", *options.words(self)))
