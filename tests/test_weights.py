"""Weights: the very tensors of their source, whole or not at all, broken files found and made again."""

import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import load_file, save_file
from transformers import OPTConfig, OPTForCausalLM

from helpers import models
from helpers.errors import Refused
from helpers.machine import disks
from helpers.weights import checkpoint, prompt, store, synthetic

REPOSITORY = Path(__file__).resolve().parents[1]
MINI = models.EMULATED_MODEL

tiny_config = OPTConfig(
    vocab_size=1000,
    hidden_size=64,
    num_hidden_layers=2,
    ffn_dim=256,
    num_attention_heads=4,
    max_position_embeddings=32,
    word_embed_proj_dim=64,
)


@pytest.fixture(scope="session")
def tiny() -> OPTForCausalLM:
    torch.manual_seed(0)
    model = OPTForCausalLM(tiny_config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # a fresh model's biases and norms are all alike
    return model


@pytest.fixture
def folder(tiny: OPTForCausalLM, tmp_path: Path) -> Path:
    tiny.save_pretrained(tmp_path / "tiny-opt")
    return tmp_path / "tiny-opt"


def tensors_of(prepared: store.Weights, model: models.OptModel) -> dict[str, np.ndarray]:
    target = prepared.path / f"{model.name}-np"
    return {name: np.load(target / name, allow_pickle=False) for name in model.files}


def quietly(_: str) -> None:
    pass


# ---------------------------------------------------------------- conversion


def save_safetensors(model: OPTForCausalLM, folder: Path) -> None:
    model.save_pretrained(folder)


def save_safetensors_shards(model: OPTForCausalLM, folder: Path) -> None:
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2


def save_bin(model: OPTForCausalLM, folder: Path) -> None:
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def save_bin_of_old_torch(model: OPTForCausalLM, folder: Path) -> None:
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def save_bin_shards(model: OPTForCausalLM, folder: Path) -> None:
    model.config.save_pretrained(folder)
    state = list(model.state_dict().items())
    half = len(state) // 2
    names = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")
    for file, part in zip(names, (state[:half], state[half:])):
        torch.save(dict(part), folder / file)
    weight_map = {name: names[i >= half] for i, (name, _) in enumerate(state)}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def save_as_metaseq_names(model: OPTForCausalLM, folder: Path) -> None:
    """Some checkpoints on the hub have no `model.` prefix, and fairseq's version mark."""
    model.config.save_pretrained(folder)
    state = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    torch.save({**state, "decoder.version": torch.tensor([3.0])}, folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    "save",
    [
        save_safetensors,
        save_safetensors_shards,
        save_bin,
        save_bin_of_old_torch,
        save_bin_shards,
        save_as_metaseq_names,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_converted_tensors_are_those_transformers_loads(tiny, tmp_path, save, dtype):
    model = OPTForCausalLM(tiny_config)
    model.load_state_dict(tiny.state_dict())
    (tmp_path / "a").mkdir()
    save(model.to(dtype), tmp_path / "a")
    prepared = store.prepare(str(tmp_path / "a"), quietly, tmp_path / "home")

    opt = models.resolve(str(tmp_path / "a"))
    found = tensors_of(prepared, opt)
    expected = {
        name.replace("decoder.final_layer_norm", "decoder.layer_norm"): parameter.detach().half().numpy()
        for name, parameter in model.model.named_parameters()
    }
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert values.dtype == np.float16 and values.flags.c_contiguous
        np.testing.assert_array_equal(values, expected[name], err_msg=name)
    assert prepared.source == f"folder: {tmp_path / 'a'}"


def test_an_explicit_head_that_is_the_embedding_is_left_out_and_another_one_refused(folder, tmp_path):
    file = folder / "model.safetensors"
    state = load_file(file)
    embedding = state["model.decoder.embed_tokens.weight"]
    save_file({**state, "lm_head.weight": embedding.clone()}, file)
    prepared = store.prepare(str(folder), quietly, tmp_path / "home")
    assert not (prepared.path / "tiny-opt-np" / "lm_head.weight").exists()
    save_file({**state, "lm_head.weight": embedding + 1}, file)
    with pytest.raises(Refused, match="lm_head.weight differs"):
        store.prepare(str(folder), quietly, tmp_path / "home")


def test_safetensors_are_preferred_to_bin(folder, tmp_path):
    (folder / "pytorch_model.bin").write_bytes(b"not to be opened")
    store.prepare(str(folder), quietly, tmp_path / "home")


# ---------------------------------------------------------------- sources that are refused


def rewrite(folder: Path, change) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


def another_shape(state):
    state["model.decoder.layers.1.fc1.bias"] = torch.zeros(17)


def one_missing(state):
    del state["model.decoder.layers.0.self_attn.k_proj.weight"]


def one_too_many(state):
    state["model.decoder.layers.2.fc1.bias"] = torch.zeros(256)


def beyond_fp16(state):
    state["model.decoder.layers.0.fc2.bias"][3] = 70000.0


def not_a_number(state):
    state["model.decoder.layers.0.fc2.bias"][3] = math.nan


def whole_numbers(state):
    state["model.decoder.layers.0.fc2.bias"] = torch.zeros(64, dtype=torch.int64)


@pytest.mark.parametrize(
    "change, words",
    [
        (another_shape, ("decoder.layers.1.fc1.bias", "(17,)", "(256,)")),
        (one_missing, ("decoder.layers.0.self_attn.k_proj.weight", "(64, 64)", "missing")),
        (one_too_many, ("decoder.layers.2.fc1.bias", "(256,)", "no place")),
        (beyond_fp16, ("decoder.layers.0.fc2.bias", "fp16")),
        (not_a_number, ("decoder.layers.0.fc2.bias", "fp16")),
        (whole_numbers, ("model.safetensors", "decoder.layers.0.fc2.bias", "I64")),
    ],
)
def test_a_folder_that_is_not_its_configs_model_is_refused_by_tensor(folder, tmp_path, change, words):
    rewrite(folder, change)
    with pytest.raises(Refused) as refusal:
        store.prepare(str(folder), quietly, tmp_path / "home")
    assert all(word in str(refusal.value) for word in (str(folder), *words))
    assert not list((tmp_path / "home").rglob("*-np"))


def test_a_folder_without_weights_or_with_a_shard_missing_is_refused_by_file(tiny, tmp_path):
    tiny_config.save_pretrained(tmp_path / "empty")
    with pytest.raises(Refused, match="no weights in it"):
        store.prepare(str(tmp_path / "empty"), quietly, tmp_path / "home")
    save_safetensors_shards(tiny, tmp_path / "shards")
    lost = sorted((tmp_path / "shards").glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(Refused, match=lost.name):
        store.prepare(str(tmp_path / "shards"), quietly, tmp_path / "home")


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (os.mkdir, (str(self.marker),))


def test_code_in_a_bin_file_does_not_run(tmp_path):
    tiny_config.save_pretrained(tmp_path / "a")
    torch.save({"model.decoder.x": Payload(tmp_path / "ran")}, tmp_path / "a" / "pytorch_model.bin")
    with pytest.raises(Refused, match="pytorch_model.bin"):
        store.prepare(str(tmp_path / "a"), quietly, tmp_path / "home")
    (tmp_path / "a" / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(Refused, match="pytorch_model.bin"):
        store.prepare(str(tmp_path / "a"), quietly, tmp_path / "home")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("file, save", [("model.safetensors", save_safetensors), ("pytorch_model.bin", save_bin)])
@pytest.mark.parametrize("kept", [0, 5, 0.01, 0.5, 0.999])
def test_a_source_file_that_is_cut_off_is_refused_by_name(tiny, tmp_path, file, save, kept):
    save(tiny, tmp_path / "a")
    whole = (tmp_path / "a" / file).read_bytes()
    (tmp_path / "a" / file).write_bytes(whole[: kept if isinstance(kept, int) else int(kept * len(whole))])
    with pytest.raises(Refused, match=file):
        store.prepare(str(tmp_path / "a"), quietly, tmp_path / "home")
    assert not list((tmp_path / "home").rglob("*-np"))


@pytest.mark.parametrize("file, save", [("model.safetensors", save_safetensors), ("pytorch_model.bin", save_bin)])
def test_a_git_lfs_pointer_is_named(tiny, tmp_path, file, save):
    save(tiny, tmp_path / "a")
    (tmp_path / "a" / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(Refused, match=f"{file}: a Git LFS pointer.*git lfs pull") as refusal:
        store.prepare(str(tmp_path / "a"), quietly, tmp_path / "home")
    assert "weights_only" not in str(refusal.value)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_prefixes_of_ddp_and_torch_compile_are_stripped(folder, tmp_path, prefix):
    plain = tensors_of(store.prepare(str(folder), quietly, tmp_path / "plain"), models.resolve(str(folder)))

    def wrap(state):
        for name in list(state):
            state[prefix + name] = state.pop(name)

    rewrite(folder, wrap)
    wrapped = tensors_of(store.prepare(str(folder), quietly, tmp_path / "wrapped"), models.resolve(str(folder)))
    for name, values in plain.items():
        np.testing.assert_array_equal(wrapped[name], values, err_msg=name)


HUGE_NAME = json.dumps({"x" * (1 << 20): {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()


@pytest.mark.parametrize(
    "header, claimed",
    [
        (b"{}", 1 << 62),
        (b" " * (20 << 20), 20 << 20),
        (b'{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 4]}}', None),
        (b'{"a": {"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 4]}}', None),
        (HUGE_NAME, None),
        (b"\x00" * (1 << 20), None),
    ],
    ids=["longer than the file", "oversized", "infinite", "overflowing", "a huge name", "noise"],
)
def test_a_damaged_safetensors_header_gives_one_short_line(tmp_path, header, claimed):
    file = tmp_path / "model.safetensors"
    file.write_bytes((claimed or len(header)).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(Refused) as refusal:
        checkpoint.tensors(tmp_path, {"decoder.embed_tokens.weight": (1, 1)})
    assert str(tmp_path) in str(refusal.value)
    assert len(str(refusal.value)) < 1000 and "\n" not in str(refusal.value)


def test_an_index_of_shards_is_bounded(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(" " * (20 << 20) + "{}")
    with pytest.raises(Refused, match="over 16 MiB"):
        checkpoint.weight_files(tmp_path)


def test_a_bin_file_of_anything_but_tensors_is_refused(tmp_path):
    tiny_config.save_pretrained(tmp_path / "a")
    torch.save({"state_dict": {"a": torch.ones(1)}}, tmp_path / "a" / "pytorch_model.bin")
    with pytest.raises(Refused, match="state_dict in it is not a tensor"):
        store.prepare(str(tmp_path / "a"), quietly, tmp_path / "home")


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=200), st.integers(0, 400))
def test_no_bytes_in_a_safetensors_header_do_anything_but_refuse(noise, at):
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "model.safetensors"
        save_file({"model.decoder.layers.0.fc1.bias": torch.zeros(8)}, file)
        content = bytearray(file.read_bytes())
        content[at : at + len(noise)] = noise
        file.write_bytes(bytes(content))
        with suppress(Refused):
            checkpoint.tensors(Path(name), {"decoder.layers.0.fc1.bias": (8,), "decoder.embed_tokens.weight": (1, 1)})


# ---------------------------------------------------------------- broken files


def truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 2)


def emptied(file: Path) -> None:
    os.truncate(file, 0)


def with_more_at_the_end(file: Path) -> None:
    with file.open("ab") as end:
        end.write(b"\0\0")


def save_array(file: Path, values: np.ndarray) -> None:
    with file.open("wb") as opened:  # by name, np.save would add .npy
        np.save(opened, values)


def of_another_shape(file: Path) -> None:
    save_array(file, np.load(file)[None])


def of_another_dtype(file: Path) -> None:
    save_array(file, np.load(file).astype(np.float32))


def big_endian(file: Path) -> None:
    save_array(file, np.load(file).astype(">f2"))


def columns_first(file: Path) -> None:
    save_array(file, np.asfortranarray(np.load(file)))


def pickled(file: Path) -> None:
    save_array(file, np.array([{}], dtype=object))


def overwritten(file: Path) -> None:
    file.write_bytes(b"\x93NUMPY" + os.urandom(200))


DAMAGES = [
    Path.unlink,
    truncated,
    emptied,
    with_more_at_the_end,
    of_another_shape,
    of_another_dtype,
    big_endian,
    columns_first,
    pickled,
    overwritten,
]
MATRIX = "decoder.layers.1.fc1.weight"


@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_with_a_broken_file_are_made_again(folder, tmp_path, damage):
    prepared = store.prepare(str(folder), quietly, tmp_path / "home")
    opt = models.resolve(str(folder))
    target = prepared.path / "tiny-opt-np"
    before = {file.name: file.read_bytes() for file in target.iterdir()}
    damage(target / MATRIX)
    assert list(store.broken_files(target, opt)) == [MATRIX]

    said: list[str] = []
    assert store.prepare(str(folder), said.append, tmp_path / "home") == prepared
    assert str(target) in said[0] and MATRIX in said[0]
    assert {file.name: file.read_bytes() for file in target.iterdir()} == before
    said.clear()
    assert store.prepare(str(folder), said.append, tmp_path / "home") == prepared and said == []


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2 * 64 * 64 + 200), st.binary(min_size=1, max_size=64))
def test_any_length_but_the_right_one_and_any_header_is_noticed(tmp_path, length, noise):
    model = models.OptModel("m", 1, 64, 4, vocab_size=8, max_positions=8)
    name = "decoder.layers.0.self_attn.q_proj.weight"
    file = tmp_path / name
    save_array(file, np.ones((64, 64), np.float16))
    assert name not in store.broken_files(tmp_path, model)
    whole = file.read_bytes()
    file.write_bytes((whole + bytes(200))[:length])
    assert (name in store.broken_files(tmp_path, model)) == (length != len(whole))
    file.write_bytes(noise + whole[len(noise) :])
    store.broken_files(tmp_path, model)  # says yes or no, whatever the bytes


def test_looking_at_a_350_gb_model_reads_headers_only(tmp_path):
    """The files are holes: reading them whole would take minutes, and their sizes must still be believed."""
    opt = models.KNOWN_MODELS["opt-175b"]
    for name, shape in opt.files.items():
        with (tmp_path / name).open("wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "<f2", "fortran_order": False, "shape": shape})
            file.truncate(file.tell() + 2 * math.prod(shape))
    assert store.broken_files(tmp_path, opt) == {}
    assert sum(file.stat().st_blocks for file in tmp_path.iterdir()) * 512 < 2**25


def test_without_their_source_complete_weights_serve_and_broken_ones_are_refused(folder, tmp_path):
    prepared = store.prepare(str(folder), quietly, tmp_path / "home")
    (folder / "model.safetensors").unlink()
    assert store.prepare(str(folder), quietly, tmp_path / "home") == prepared
    target = prepared.path / "tiny-opt-np"
    truncated(target / MATRIX)
    with pytest.raises(Refused) as refusal:
        store.prepare(str(folder), quietly, tmp_path / "home")
    assert all(words in str(refusal.value) for words in (str(target), MATRIX, "no weights in it", "delete"))
    assert target.is_dir()


def test_a_folder_saved_anew_is_converted_anew(folder, tiny, tmp_path):
    first = store.prepare(str(folder), quietly, tmp_path / "home")
    other = OPTForCausalLM(tiny_config)
    other.save_pretrained(folder)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    said: list[str] = []
    second = store.prepare(str(folder), said.append, tmp_path / "home")
    opt = models.resolve(str(folder))
    bias = other.model.decoder.embed_tokens.weight.detach().half().numpy()
    np.testing.assert_array_equal(tensors_of(second, opt)["decoder.embed_tokens.weight"], bias)
    assert second.path == first.path and said


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"source": 1, "prompt_ids": [2], "prompt": "x"}'])
def test_weights_of_unknown_origin_are_made_anew(tmp_path, text):
    prepared = store.prepare("opt-mini", quietly, tmp_path)
    note = prepared.path / "opt-mini-np" / store.PROVENANCE
    note.unlink() if text is None else note.write_text(text)
    said: list[str] = []
    assert store.prepare("opt-mini", said.append, tmp_path) == prepared
    assert "unknown origin" in said[0]


def test_sources_do_not_mix(folder, tmp_path):
    other = tmp_path / "other" / "tiny-opt"
    shutil.copytree(folder, other)
    paths = {store.prepare(name, quietly, tmp_path / "home").path for name in ("opt-mini", str(folder), str(other))}
    assert len(paths) == 3


# ---------------------------------------------------------------- cut off, at once, and full

# Prepares opt-mini in argv[1]; stops for good at the tensor argv[2] until the file argv[3] is there.
STOPPING = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from helpers.weights import store, synthetic
    home, stop_at, release = sys.argv[1:]
    real = synthetic.pieces
    def pieces(name, shape, seed=0):
        values = list(real(name, shape, seed))
        if name == stop_at:
            yield values[0][:1]
            print("stopped", flush=True)
            while not Path(release).exists():
                time.sleep(0.01)
            values[0] = values[0][1:]
        yield from values
    synthetic.pieces = pieces
    print(store.prepare("opt-mini", lambda text: print(text, flush=True), Path(home)), flush=True)
""")


def preparing(home: Path, stop_at: str, release: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", STOPPING, str(home), stop_at, str(release)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )


def kill_when_stopped(process: subprocess.Popen) -> None:
    assert any(line == "stopped\n" for line in process.stdout)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("at", [0, 30, -1])
def test_a_conversion_that_is_killed_leaves_nothing_that_looks_whole(tmp_path, at):
    kill_when_stopped(preparing(tmp_path, list(MINI.files)[at], tmp_path / "never"))
    kept = tmp_path / "weights" / "synthetic"
    assert not (kept / "opt-mini-np").exists()
    assert any(entry.is_dir() for entry in kept.iterdir())  # it did die in the middle

    prepared = store.prepare("opt-mini", quietly, tmp_path)
    assert sorted(os.listdir(kept)) == [".opt-mini-np.lock", "opt-mini-np"]
    assert {file.name for file in (kept / "opt-mini-np").iterdir()} == {*MINI.files, store.PROVENANCE}
    assert prepared.path == kept


def test_of_two_at_once_one_prepares_and_the_other_waits_for_it(tmp_path):
    release = tmp_path / "release"
    first = preparing(tmp_path / "home", MATRIX, release)
    assert any(line == "stopped\n" for line in first.stdout)
    second = preparing(tmp_path / "home", "none", release)
    assert "another process" in second.stdout.readline()
    release.touch()
    (first_said, _), (second_said, _) = first.communicate(timeout=60), second.communicate(timeout=60)
    assert first.returncode == second.returncode == 0
    assert first_said.splitlines()[-1] == second_said.splitlines()[-1]
    assert second_said.count("\n") == 1  # it wrote nothing itself


def test_a_disk_too_small_is_refused_up_front_with_both_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(disks, "free_bytes", lambda path: 3 * 2**20)
    with pytest.raises(Refused, match=r"\d\.\d MiB are needed in .*, 3\.0 MiB are free"):
        store.prepare("opt-mini", quietly, tmp_path)
    assert not list(tmp_path.rglob("*-np"))


def test_a_disk_that_fills_up_meanwhile_is_said_in_words_and_leaves_nothing(tmp_path, monkeypatch):
    def pieces(name, shape):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(synthetic, "pieces", pieces)
    with pytest.raises(Refused, match="the disk is full"):
        store.prepare("opt-mini", quietly, tmp_path)
    assert os.listdir(tmp_path / "weights" / "synthetic") == [".opt-mini-np.lock"]


def test_a_home_that_is_a_file_is_refused_in_words(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(Refused, match="OFFLOAD_LAB_HOME"):
        store.prepare("opt-mini", quietly, tmp_path / "file")


# ---------------------------------------------------------------- synthetic weights


def synthetic_opt(model: models.OptModel) -> OPTForCausalLM:
    state = {}
    for name, shape in model.files.items():
        values = np.concatenate(list(synthetic.pieces(name, shape))).reshape(shape)
        name = name.replace("decoder.layer_norm", "decoder.final_layer_norm")
        state[f"model.{name}"] = torch.from_numpy(values.astype(np.float32))
    state["lm_head.weight"] = state["model.decoder.embed_tokens.weight"]
    opt = OPTForCausalLM(
        OPTConfig(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            num_hidden_layers=model.num_layers,
            ffn_dim=4 * model.hidden_size,
            num_attention_heads=model.num_heads,
            word_embed_proj_dim=model.hidden_size,
            max_position_embeddings=model.max_positions,
        )
    )
    opt.load_state_dict(state)
    return opt.eval()


def test_synthetic_models_say_different_things_to_different_prompts():
    """A model that repeats one token whatever it is asked would hide a fault in the cache or the positions."""
    opt = synthetic_opt(MINI)
    prompts = torch.randint(4, MINI.vocab_size, (16, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        answers = opt.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=16, do_sample=False, eos_token_id=None
        )[:, 8:]
    assert np.mean([len(set(answer.tolist())) for answer in answers]) > 6  # of 16 tokens
    assert len({tuple(answer.tolist()) for answer in answers}) == 16
    assert np.mean([len(set(answers[:, i].tolist())) for i in range(16)]) > 8  # of 16 prompts


@pytest.mark.parametrize("name", ["opt-mini", "opt-1.3b", "opt-175b"])
def test_no_synthetic_model_can_overflow_fp16(name):
    """Each matrix keeps its input's scale, but for fc2's wider input: so does a sum over all layers."""
    model = models.KNOWN_MODELS.get(name, MINI)
    h = model.hidden_size
    gains = {}
    for matrix in ("self_attn.v_proj", "self_attn.out_proj", "fc1", "fc2"):
        tensor = f"decoder.layers.0.{matrix}.weight"
        shape = model.files[tensor]
        rows = next(synthetic.pieces(tensor, shape)).astype(np.float64)
        rows = rows[: len(rows) // shape[1] * shape[1]].reshape(-1, shape[1])
        given_in = np.random.default_rng(0).standard_normal(shape[1])
        gains[matrix] = np.sqrt(np.mean((rows @ given_in) ** 2))
    per_layer = gains["self_attn.v_proj"] * gains["self_attn.out_proj"] + gains["fc1"] * gains["fc2"]
    # Layers all adding up in one direction, and one activation out of h ten deviations off: neither comes about.
    assert 10 * model.num_layers * per_layer < 65504 / 8
    assert h**0.5 * gains["fc1"] < 65504 / 8  # a query with a key that is the same


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 5))
def test_a_synthetic_tensor_depends_on_its_seed_and_name_alone(rows, columns, seed):
    def draw(name, seed):
        return np.concatenate(list(synthetic.pieces(name, (rows, columns), seed)))

    values = draw("decoder.layers.0.fc1.weight", seed)
    assert values.dtype == np.float16 and values.size == rows * columns
    np.testing.assert_array_equal(values, draw("decoder.layers.0.fc1.weight", seed))
    if values.size > 8:
        assert not np.array_equal(values, draw("decoder.layers.1.fc1.weight", seed))
        assert not np.array_equal(values, draw("decoder.layers.0.fc1.weight", seed + 1))


@pytest.mark.parametrize(
    "tensor, mean, deviation",
    [
        ("decoder.layers.0.fc2.weight", 0, 1 / 16),
        ("decoder.embed_tokens.weight", 0, 0.02),
        ("decoder.embed_positions.weight", 0, 0.02),
    ],
)
def test_synthetic_tensors_have_the_scale_they_are_said_to(tensor, mean, deviation):
    values = np.concatenate(list(synthetic.pieces(tensor, MINI.files[tensor]))).astype(np.float64)
    assert abs(values.mean() - mean) < 5 * deviation / values.size**0.5
    assert abs(values.std() / deviation - 1) < 0.01


# ---------------------------------------------------------------- the prompt


def test_without_a_tokenizer_the_ids_are_fixed_and_said_to_be(tmp_path):
    prepared = store.prepare("opt-mini", quietly, tmp_path)
    assert prepared.prompt_ids == prompt.FIXED_PROMPT_IDS and "no tokenizer files" in prepared.prompt
    for model in models.KNOWN_MODELS.values():
        assert max(prompt.FIXED_PROMPT_IDS) < model.vocab_size


@given(st.integers(5, 2000))
def test_fixed_ids_fit_any_vocabulary_and_never_are_padding(vocab_size):
    ids = prompt.fixed_ids(models.OptModel("m", 1, 64, 4, vocab_size=vocab_size))
    assert len(ids) == 7 and ids[0] == 2 and all(2 <= i < vocab_size for i in ids)


def write_tokenizer(folder: Path) -> None:
    """OPT's special tokens, all bytes, and a few merges."""
    from tokenizers.pre_tokenizers import ByteLevel

    merges = [("P", "a"), ("Pa", "r"), ("i", "s"), ("Par", "is"), ("Ġ", "is"), ("t", "h"), ("Ġ", "c"), ("o", "f")]
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *sorted(ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in merges) + "\n")


@pytest.mark.parametrize("form", ["vocab.json and merges.txt", "tokenizer.json"])
def test_with_tokenizer_files_the_ids_are_transformers_own_after_bos(folder, tmp_path, form):
    from transformers import GPT2Tokenizer

    write_tokenizer(folder)
    oracle = GPT2Tokenizer(
        vocab=str(folder / "vocab.json"),
        merges=str(folder / "merges.txt"),
        bos_token="</s>",
        eos_token="</s>",
        unk_token="</s>",
        pad_token="<pad>",
    )
    expected = oracle(prompt.SENTENCE, add_special_tokens=False).input_ids
    if form == "tokenizer.json":
        oracle.backend_tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "vocab.json").unlink()
        (folder / "merges.txt").unlink()
    prepared = store.prepare(str(folder), quietly, tmp_path / "home")
    assert prepared.prompt == "tokenizer"
    assert prepared.prompt_ids == (2, *expected)
    assert len(expected) < len(prompt.SENTENCE)  # the merges were used
    assert store.prepare(str(folder), quietly, tmp_path / "home") == prepared  # kept beside the weights


@pytest.mark.parametrize("text", ["", "{", '{"a": 5000}'])
def test_a_tokenizer_that_cannot_be_used_is_said_and_the_ids_are_fixed(folder, tmp_path, text):
    write_tokenizer(folder)
    (folder / "vocab.json").write_text(text)
    prepared = store.prepare(str(folder), quietly, tmp_path / "home")
    assert prepared.prompt_ids == prompt.FIXED_PROMPT_IDS and str(folder) in prepared.prompt
