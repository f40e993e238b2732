"""accelerate on the same work as FlexGen: a model of OPT's shape, `generate`, weights split by layer over the tiers.

    python benchmarks/peers.py --model opt-1.3b --splits gpu cpu disk --output outputs/peers.jsonl

Each split runs in a process of its own: one warm-up token, then one timed generation. Each is a line of the output as
soon as it is measured. Weights are random, which changes no shape and no byte. accelerate isn't a requirement of this
lab; Colab has it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from helpers import models  # noqa: E402
from helpers.models import OptModel  # noqa: E402

SPLITS = ("gpu", "cpu", "disk", "half-cpu", "half-disk")
LIMIT_S = 900


def random_model(shape: OptModel) -> Any:
    """OPT of this shape in fp16, in host memory, filled from one block of random numbers."""
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        ffn_dim=4 * shape.hidden_size,
        num_attention_heads=shape.num_heads,
        max_position_embeddings=shape.max_positions,
        word_embed_proj_dim=shape.hidden_size,
    )
    with torch.device("meta"):
        model = OPTForCausalLM(config)
    model = model.half().to_empty(device="cpu")
    model.tie_weights()
    largest = max(parameter.numel() for parameter in model.parameters())
    block = torch.empty(largest, dtype=torch.float32).normal_(0, 0.02).half()
    for parameter in model.parameters():
        parameter.data.copy_(block[: parameter.numel()].view_as(parameter))
    return model.eval()


def dispatched(model: Any, split: str, layers: int, device: Any, folder: str) -> Any:
    """The model over the tiers as accelerate's users do it."""
    import accelerate

    if split == "gpu":
        return model.to(device)
    if split == "cpu":
        return accelerate.cpu_offload(model, execution_device=device)
    if split == "disk":
        return accelerate.disk_offload(model, folder, execution_device=device)
    tier = split.removeprefix("half-")
    device_map = {"model.decoder.embed_tokens": device, "model.decoder.embed_positions": device, "lm_head": device}
    device_map["model.decoder.final_layer_norm"] = device
    device_map |= {f"model.decoder.layers.{i}": device if i < layers // 2 else tier for i in range(layers)}
    return accelerate.dispatch_model(model, device_map, main_device=device, offload_dir=folder)


def measure(options: argparse.Namespace, split: str) -> dict[str, Any]:
    """One split, in this process."""
    import torch

    shape = models.resolve(options.model)
    on_cuda = torch.cuda.is_available()
    device = 0 if on_cuda else "cpu"
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, torch.inference_mode():
        model = dispatched(random_model(shape), split, shape.num_layers, device, folder)
        prompt = torch.full((options.batch, options.prompt_len), 5, device=device)
        lengths = {"do_sample": False, "pad_token_id": 1, "attention_mask": torch.ones_like(prompt)}
        model.generate(prompt, min_new_tokens=1, max_new_tokens=1, **lengths)
        if on_cuda:
            torch.cuda.synchronize()
        began_s = time.perf_counter()
        model.generate(prompt, min_new_tokens=options.gen_len, max_new_tokens=options.gen_len, **lengths)
        if on_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began_s
    return {
        "machine": torch.cuda.get_device_name() if on_cuda else "CPU",
        "total_latency_s": seconds,
        "total_throughput_tok_s": options.batch * options.gen_len / seconds,
        "peak_gpu_mem_gib": torch.cuda.max_memory_allocated() / 2**30 if on_cuda else None,
    }


def work(options: argparse.Namespace, split: str) -> dict[str, Any]:
    """What makes two lines the same measurement."""
    lengths = {"prompt_len": options.prompt_len, "gen_len": options.gen_len, "batch": options.batch}
    return {"peer": "accelerate", "split": split, "model": options.model, **lengths}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="opt-1.3b")
    parser.add_argument("--splits", nargs="+", default=SPLITS, choices=SPLITS)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--gen-len", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument(
        "--folder", help="where accelerate puts weights on disk; default: the system's temporary folder"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "peers.jsonl")
    parser.add_argument("--one", choices=SPLITS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options, options.one)))
        return 0
    failed = False
    for split in options.splits:
        command = [sys.executable, *sys.argv, "--one", split]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        line: dict[str, Any] = work(options, split) | {"started_at": datetime.now(UTC).isoformat(timespec="seconds")}
        line["versions"] = {name: version(name) for name in ("accelerate", "transformers", "torch")}
        if ran.returncode:
            failed = True
            line["failure"] = (ran.stderr.strip().splitlines() or ["no reason given"])[-1]
        else:
            line |= json.loads(ran.stdout.splitlines()[-1])
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with open(options.output, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")
        print(f"{split}: {line.get('failure') or '{:.3g} token/s'.format(line['total_throughput_tok_s'])}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
