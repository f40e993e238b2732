"""Bad input at every door: refused in one or two lines that name value and rule; nothing started, nothing written."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

import papermill
import psutil
import pytest
from hypothesis import HealthCheck, given, settings as hypothesis_settings, strategies as st

from helpers import homework, lab, models, notebook, suite
from helpers.__main__ import REFUSED, main
from helpers.analysis import readers
from helpers.engine import launcher
from helpers.errors import Refused
from helpers.machine import profiles
from helpers.machine.profiles import T4_COLAB
from helpers.report.comparison import REFERENCE
from helpers.weights import store

SPLIT = ("--percent", "100", "0", "100", "0", "100", "0")
MEASURE = ("measure", "--device", "emulated", "--output", "out")
PROFILE = json.loads(T4_COLAB.model_dump_json())
OPT_CONFIG = {
    "model_type": "opt",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 256,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 64,
}
HEADER = "model,percent,gpu_batch_size,prompt_len,gen_len"
ROW = "opt-1.3b,100 0 100 0 100 0,4,128,16"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to stand in, with a home in it that does not exist yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OFFLOAD_LAB_HOME", str(tmp_path / "home"))
    for what, name in ((launcher, "run"), (launcher, "warm_server"), (papermill, "execute_notebook")):
        monkeypatch.setattr(what, name, started)
    return tmp_path


def started(*arguments, **options):
    raise AssertionError("something was started")


def everything(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in (folder, *folder.rglob("*"))}


def assert_refused(arguments, words, folder, capsys):
    before, started = everything(folder), set(psutil.Process().children(recursive=True))
    assert main(list(arguments)) == REFUSED, arguments
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("refused: "), said
    assert 1 <= len(said.err.strip().splitlines()) <= 2, said.err
    for word in words:
        assert word in said.err, f"{word!r} is not named: {said.err}"
    assert everything(folder) == before
    assert set(psutil.Process().children(recursive=True)) <= started


# ---- the command line: arguments, and the words that the refusal must have


def measure(*arguments, percent=SPLIT):
    return (*MEASURE, *percent, *arguments)


COMMANDS = [
    (("",), ["''"]),
    (("rum",), ["'rum'"]),
    (("run", "q9"), ["'q9'", "q1"]),
    (("run", "q1", "--device", "gpu"), ["gpu", "cuda"]),
    (("run", "q1", "--device", ""), ["''", "cuda"]),
    (("run", "q1", "--page-cache", "warm", "--device", "emulated"), ["warm", "cold"]),
    (("run", "q1", "--model", "gpt-2", "--device", "emulated"), ["'gpt-2'", "opt-1.3b"]),
    (("run", "q1", "--model", "../../etc", "--device", "emulated"), ["../../etc"]),
    (("run", "../01_offload_sweep", "--device", "emulated"), ["../01_offload_sweep"]),
    (("run", "machine", "--device", "emulated", "--output", "/proc/nothing"), ["/proc/nothing"]),
    (("run", "machine", "--model", "gpt-2", "--device", "emulated", "--output", "out"), ["'gpt-2'"]),
    (("run", "q1", "--dry-run", "--model", "opt-350m", "--device", "emulated"), ["opt-350m"]),
    (("run", "--fresh=maybe"), ["maybe"]),
    (measure(percent=()), ["--percent"]),
    (measure(percent=("--percent",)), ["--percent"]),
    (measure(percent=("--percent", "100")), ["1 number,", "6"]),
    (measure(percent=("--percent", "50", "50", "100", "0", "100")), ["5 numbers", "6"]),
    (measure(percent=("--percent", "60", "60", "100", "0", "100", "0")), ["60 + 60", "100"]),
    (measure(percent=("--percent", "-10", "110", "100", "0", "100", "0")), ["-10"]),
    (measure(percent=("--percent", "50.5", "0", "100", "0", "100", "0")), ["50.5", "whole"]),
    (measure(percent=("--percent", "100", "0", "100", "0", "50", "50")), ["50 50", "activations"]),
    (measure(percent=("--percent", "1e2", "0", "100", "0", "100", "0")), ["1e2"]),
    (measure(percent=("--percent", "١٠٠", "0", "100", "0", "100", "0")), ["١٠٠"]),
    (measure(percent=("--percent", "9" * 400, "0", "100", "0", "100", "0")), ["999"]),
    (measure("--model", "opt-350m"), ["opt-350m"]),
    (measure("--model", "facebook/"), ["facebook/"]),
    (measure("--model", "../../x"), ["../../x"]),
    (measure("--model", "~nobody-of-that-name/x"), ["~nobody-of-that-name/x"]),
    (measure("--model", "x" * 5000), ["xxx"]),
    (measure("--model", "opt-1.3b\nopt-6.7b"), ["opt-6.7b"]),
    (measure("--model", "\x1b[31mopt"), ["opt"]),
    (measure("--device", "tpu"), ["'tpu'"]),
    (measure("--prompt-len", "0"), ["prompt_len=0"]),
    (measure("--prompt-len", "6"), ["prompt_len=6"]),
    (measure("--prompt-len", "1.5"), ["1.5"]),
    (measure("--prompt-len", "2048"), ["2048", "positions"]),
    (measure("--gen-len", "0"), ["gen_len=0"]),
    (measure("--gen-len", "-3"), ["gen_len=-3"]),
    (measure("--gen-len", str(10**30)), [str(10**30)]),
    (measure("--gpu-batch-size", "0"), ["gpu_batch_size=0"]),
    (measure("--gpu-batch-size", "four"), ["four"]),
    (measure("--num-gpu-batches", "0"), ["num_gpu_batches=0"]),
    (measure("--repeats", "0"), ["repeats=0"]),
    (measure("--overlap", "maybe"), ["maybe"]),
    (measure("--pin-weight", "2"), ["2"]),
    (measure("--attn-sparsity", "0"), ["attn_sparsity"]),
    (measure("--attn-sparsity", "nan"), ["attn_sparsity"]),
    (measure("--attn-sparsity", "inf"), ["attn_sparsity"]),
    (measure("--debug-mode", "slow"), ["slow"]),
    (measure("--debug-mode", "breakdown", "--gen-len", "1"), ["gen_len 1"]),
    (measure("--page-cache", "lukewarm"), ["lukewarm"]),
    (measure("--compress-cache", "--attn-sparsity", "0.5"), ["0.5"]),
    (measure("--compress-cache", percent=("--percent", "100", "0", "50", "50", "100", "0")), ["compress"]),
    (measure("--output", "/dev/null/x"), ["/dev/null/x"]),
    (measure("--output", ""), ["output folder", "empty"]),
    (measure("--output", "a\0b"), ["null"]),
    (measure("--output", "x" * 5000), ["too long"]),
    (measure("--offload-dir", "/dev/null"), ["/dev/null"]),
    (measure("--offload-dir", "a\0b"), ["null"]),
    (measure("--offload-dir", ""), ["offload folder", "empty"]),
    (measure("--frobnicate"), ["--frobnicate"]),
    (("place",), ["--percent"]),
    (("place", "--percent", "50", "60", "0", "0", "100", "0"), ["50 + 60"]),
    (("place", *SPLIT, "--model", "bert"), ["'bert'"]),
    (("place", *SPLIT, "--json", "yes"), ["yes"]),
    (("predict", *SPLIT), ["--machine"]),
    (("predict", *SPLIT, "--machine", "a100"), ["'a100'", "t4-colab"]),
    (("predict", *SPLIT, "--machine", "."), ["'.'"]),
    (("predict", *SPLIT, "--machine", "~nobody-of-that-name"), ["~nobody-of-that-name"]),
    (("predict", *SPLIT, "--machine", "x" * 5000), ["xxx"]),
    (("predict", *SPLIT, "--machine", "a\0b"), ["neither a profile"]),
    (("predict", *SPLIT, "--machine", "t4-colab", "--model", "llama"), ["'llama'"]),
    (("predict", *SPLIT, "--machine", "t4-colab", "--gen-len", "5000"), ["5000"]),
    (("search", "--machine", "t4"), ["'t4'"]),
    (("search", "--machine", "t4-colab", "--prompt-len", "2048"), ["2048"]),
    (("search", "--machine", "t4-colab", "--gen-len", "0"), ["gen_len=0"]),
    (("analyze",), ["PATH"]),
    (("analyze", "figures.csv", "--output", "out"), ["figures.csv", "no such file"]),
    (("analyze", ".", "--output", "out"), ["no file in it holds runs"]),
    (("analyze", "/etc/passwd", "--output", "out"), ["/etc/passwd"]),
    (("analyze", str(REFERENCE), "--output", "/dev/null"), ["/dev/null"]),
    (("analyze", str(REFERENCE), "--output", "/proc/nothing"), ["/proc/nothing"]),
    (("analyze", str(REFERENCE), "--output", "a\0b"), ["null"]),
    (("analyze", "x" * 300 + ".csv", "--output", "out"), ["xxx"]),
    (("doctor", "--fix"), ["--fix"]),
]


@pytest.mark.parametrize("arguments, words", COMMANDS, ids=[" ".join(a)[:60] for a, _ in COMMANDS])
def test_a_command_that_makes_no_sense_is_refused(arguments, words, here, capsys):
    assert_refused(arguments, words, here, capsys)


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(
    flag=st.sampled_from(
        (
            "--model",
            "--device",
            "--prompt-len",
            "--gen-len",
            "--gpu-batch-size",
            "--num-gpu-batches",
            "--overlap",
            "--pin-weight",
            "--attn-sparsity",
            "--debug-mode",
            "--page-cache",
            "--repeats",
        )
    ),
    value=st.text(min_size=1).filter(lambda text: not text.startswith("-")),
)
def test_any_text_is_a_value_or_refused(flag, value, here, capsys, monkeypatch):
    """Whatever stands after a flag: it means something, or is refused; no traceback, and nothing runs."""
    ran = []
    monkeypatch.setattr(lab, "run", lambda *arguments, **options: ran.append(arguments) or sys.exit(0))
    before = everything(here)
    try:
        assert main([*MEASURE, *SPLIT, flag, value]) == REFUSED
        said = capsys.readouterr().err
        assert said.startswith("refused: ") and len(said.strip("\n").split("\n")) <= 2, said
    except SystemExit:
        assert ran
    assert everything(here) == before


# ---- files


def profile(**changes):
    return json.dumps({name: value for name, value in (PROFILE | changes).items() if value is not ...})


FILES = [
    # machine profiles
    ("m.json", "", ["predict", *SPLIT, "--machine"], ["m.json", "JSON"]),
    ("m.json", "{", ["predict", *SPLIT, "--machine"], ["m.json", "JSON"]),
    ("m.json", "[]", ["predict", *SPLIT, "--machine"], ["m.json", "list"]),
    ("m.json", "{}", ["predict", *SPLIT, "--machine"], ["m.json", "name is missing"]),
    ("m.json", b"\xff\xfe", ["predict", *SPLIT, "--machine"], ["m.json", "JSON"]),
    ("m.json", "[" * 100_000, ["predict", *SPLIT, "--machine"], ["m.json", "JSON"]),
    ("m.json", profile(disk_gb_s=0), ["predict", *SPLIT, "--machine"], ["m.json", "disk_gb_s=0"]),
    ("m.json", profile(disk_gb_s=-1), ["predict", *SPLIT, "--machine"], ["m.json", "disk_gb_s=-1"]),
    ("m.json", profile(disk_gb_s="fast"), ["predict", *SPLIT, "--machine"], ["m.json", "'fast'"]),
    ("m.json", profile(disk_gb_s=None), ["predict", *SPLIT, "--machine"], ["m.json", "disk_gb_s=None"]),
    ("m.json", profile(disk_gb_s=True), ["predict", *SPLIT, "--machine"], ["m.json", "disk_gb_s=True"]),
    ("m.json", profile(disk_gb_s=float("nan")), ["predict", *SPLIT, "--machine"], ["m.json", "disk_gb_s"]),
    ("m.json", profile(disk_gb_s=float("inf")), ["search", "--machine"], ["m.json", "disk_gb_s"]),
    ("m.json", profile(disk_gb_s=...), ["search", "--machine"], ["m.json", "disk_gb_s is missing"]),
    ("m.json", profile(turbo=1), ["search", "--machine"], ["m.json", "turbo"]),
    ("m.json", profile(name=5), ["search", "--machine"], ["m.json", "name=5"]),
    ("m.json", profile(sources=[]), ["search", "--machine"], ["m.json", "sources"]),
    ("m.json", profile(gpu_mem_gib=1e-9), ["search", "--machine"], ["fit"]),
    # figures
    ("f.csv", "", ["analyze"], ["f.csv", "empty"]),
    ("f.csv", "\n\n", ["analyze"], ["f.csv", "empty"]),
    ("f.csv", HEADER, ["analyze"], ["f.csv", "no rows"]),
    ("f.csv", "a;b;c\n1;2;3\n", ["analyze"], ["f.csv", "percent"]),
    ("f.csv", f"{HEADER}\n{ROW},7\n", ["analyze"], ["line 2", "6 cells"]),
    ("f.csv", f"{HEADER},gen_len\n{ROW},16\n", ["analyze"], ["'gen_len'", "twice"]),
    ("f.csv", f"{HEADER}\n{ROW.replace('128', '1e999')}\n", ["analyze"], ["line 2", "'1e999'"]),
    ("f.csv", f"{HEADER}\n{ROW.replace('128', '9' * 5000)}\n", ["analyze"], ["line 2", "prompt_len"]),
    ("f.csv", f"{HEADER}\n{ROW.replace('opt-1.3b', '../../x')}\n", ["analyze"], ["line 2", "../../x"]),
    ("f.csv", f"{HEADER}\n{ROW.replace('100 0 100', '100 50 100')}\n", ["analyze"], ["line 2", "100 + 50"]),
    ("f.csv", f"{HEADER},wall_time_s\n{ROW},OOM\n", ["analyze"], ["line 2", "wall_time_s", "'OOM'"]),
    ("f.csv", f"{HEADER},wall_time_s\n{ROW},-1\n", ["analyze"], ["line 2", "'-1'"]),
    ("f.csv", f"{HEADER},wall_time_s\n{ROW},nan\n", ["analyze"], ["line 2", "'nan'"]),
    ("f.csv", f"{HEADER},wall_time_s\n{ROW},0\n", ["analyze"], ["line 2", "'0'"]),
    ("f.csv", f"{HEADER}\n{ROW}\n".encode("utf-16"), ["analyze"], ["f.csv", "throughput"]),
    ("f.csv", f"{HEADER},notes\n{ROW},n\u00e9\n".encode("latin-1"), ["analyze"], ["f.csv", "UTF-8"]),
    ("f.csv", b"PK\x03\x04\x00\x00\x00", ["analyze"], ["f.csv"]),
    ("f.csv", f'{HEADER}\n"{"x" * 200_000}', ["analyze"], ["f.csv", "CSV"]),
    ("f.xlsx", b"PK\x03\x04", ["analyze"], ["f.xlsx", ".csv"]),
    # logs
    ("r.jsonl", "", ["analyze"], ["r.jsonl", "no readable record"]),
    ("r.jsonl", "{}\n[]\nnull\n", ["analyze"], ["r.jsonl", "no readable record"]),
    ("r.jsonl", b"\xff\x00\xfe\n" * 3, ["analyze"], ["r.jsonl", "no readable record"]),
    ("r.jsonl", "[" * 100_000 + "\n", ["analyze"], ["r.jsonl", "no readable record"]),
    (
        "r.jsonl",
        '{"schema_version":1,"method_version":1,"key":"0","kind":"k","status":"done",}\n',
        ["analyze"],
        ["r.jsonl", "no readable record"],
    ),
]


@pytest.mark.filterwarnings("ignore:.*not a record, skipped")
@pytest.mark.parametrize("name, content, command, words", FILES, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(FILES)])
def test_a_file_that_is_none_is_refused_by_name(name, content, command, words, here, capsys):
    (here / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    extra = ["--output", "out"] if command == ["analyze"] else []
    assert_refused([*command, name, *extra], words, here, capsys)


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from([*profiles.numbers(), "name", "sources", "else"]),
        st.none()
        | st.booleans()
        | st.text(max_size=5)
        | st.floats()
        | st.integers()
        | st.lists(st.integers(), max_size=2),
        min_size=1,
        max_size=3,
    )
)
def test_any_change_of_a_profile_is_a_profile_or_refused_in_one_line(here, changes):
    (here / "m.json").write_text(json.dumps(PROFILE | changes))
    try:
        profiles.load(str(here / "m.json"))
    except Refused as refusal:
        assert "m.json" in str(refusal) and "\n" not in str(refusal)


@pytest.mark.filterwarnings("ignore:.*not a record, skipped")
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100)
@given(content=st.binary(max_size=300), suffix=st.sampled_from([".csv", ".jsonl"]))
def test_any_bytes_are_figures_or_refused(here, content, suffix):
    path = here / f"any{suffix}"
    path.write_bytes(content)
    with pytest.raises(Refused):
        readers.read(path)


# ---- a model's folder


CONFIGS = [
    ("{", "config"),
    ("[]", "config"),
    ("null", "config"),
    (b"\xff\xfe", "config"),
    ("[" * 100_000, "config"),
    ({"model_type": "llama"}, "'llama'"),
    ({"model_type": None}, "model_type"),
    ({"hidden_size": 0}, "hidden_size"),
    ({"hidden_size": -64}, "hidden_size"),
    ({"hidden_size": "64"}, "hidden_size"),
    ({"hidden_size": 64.5}, "hidden_size"),
    ({"hidden_size": True}, "hidden_size"),
    ({"hidden_size": None}, "hidden_size"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"num_hidden_layers": -2}, "num_hidden_layers"),
    ({"num_hidden_layers": 1.5}, "num_hidden_layers"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"num_attention_heads": 7}, "num_attention_heads"),
    ({"vocab_size": 0}, "vocab_size"),
    ({"vocab_size": 4}, "vocab_size"),
    ({"vocab_size": 10**12}, "vocab_size"),
    ({"max_position_embeddings": -1}, "max_position_embeddings"),
    ({"ffn_dim": 100}, "ffn_dim"),
    ({"do_layer_norm_before": False}, "do_layer_norm_before"),
    ({"pad_token_id": 0}, "pad_token_id"),
]


@pytest.mark.parametrize("change, word", CONFIGS, ids=[str(c)[:40] for c, _ in CONFIGS])
def test_a_models_folder_with_an_odd_config_is_refused(change, word, here, capsys):
    (here / "model").mkdir()
    content = json.dumps(OPT_CONFIG | change) if isinstance(change, dict) else change
    (here / "model" / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert_refused(["place", *SPLIT, "--model", "model"], ["model/config.json", word], here, capsys)
    assert_refused(measure("--model", "model"), ["model/config.json", word], here, capsys)


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100)
@given(
    st.dictionaries(
        st.sampled_from([*OPT_CONFIG, "pad_token_id", "activation_function"]),
        st.none() | st.booleans() | st.text(max_size=5) | st.floats() | st.integers(-5, 5000) | st.lists(st.integers()),
        min_size=1,
        max_size=3,
    )
)
def test_any_config_is_a_model_or_refused_in_one_line(here, changes):
    (here / "model").mkdir(exist_ok=True)
    (here / "model" / "config.json").write_text(json.dumps(OPT_CONFIG | changes))
    try:
        model = models.resolve(str(here / "model"))
        assert model.weight_bytes > 0 and model.hidden_size % model.num_heads == 0
    except Refused as refusal:
        assert "config.json" in str(refusal) and "\n" not in str(refusal)


# ---- names never become paths outside their folder


@pytest.mark.parametrize("name", ["..", "...", ".", "x/../..", "a b", "ümläut", "-rf", "~", "CON", "a\nb", ".hidden"])
def test_a_folders_name_stays_a_name(name, here):
    folder = here / "sub" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(OPT_CONFIG))
    resolved = models.resolve(str(folder)).name
    assert resolved == Path(resolved).name and resolved not in ("", ".", "..") and not resolved.startswith(("-", "."))


def test_tensors_named_like_paths_are_not_written_anywhere(here):
    import numpy as np
    from safetensors.numpy import save_file

    (here / "model").mkdir()
    (here / "model" / "config.json").write_text(json.dumps(OPT_CONFIG))
    save_file({"../../../evil": np.zeros(3, np.float16)}, here / "model" / "model.safetensors")
    with pytest.raises(Refused, match="its tensors don't match"):
        store.prepare(str(here / "model"), str, here / "home")
    assert not [path for path in here.rglob("*evil*")]


def test_a_shard_outside_its_folder_is_refused(here):
    (here / "model").mkdir()
    (here / "model" / "config.json").write_text(json.dumps(OPT_CONFIG))
    (here / "outside.safetensors").write_bytes(b"")
    index = {"weight_map": {"decoder.x": "../outside.safetensors", "decoder.y": str(here / "outside.safetensors")}}
    (here / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Refused, match="outside"):
        store.prepare(str(here / "model"), str, here / "home")


class Payload:
    def __init__(self, flag: Path) -> None:
        self.flag = str(flag)

    def __reduce__(self):
        return os.mkdir, (self.flag,)


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_with_code_in_it_is_refused_and_does_not_run(protocol, here):
    (here / "model").mkdir()
    (here / "model" / "config.json").write_text(json.dumps(OPT_CONFIG))
    with open(here / "model" / "pytorch_model.bin", "wb") as file:
        pickle.dump(Payload(here / "ran"), file, protocol=protocol)
    with pytest.raises(Refused, match=r"pytorch_model\.bin"):
        store.prepare(str(here / "model"), str, here / "home")
    assert not (here / "ran").exists()


def test_symbolic_links_among_weights_are_not_followed_when_they_are_removed(here):
    """A kept folder that someone made a link to elsewhere: what is elsewhere stays as it is."""
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("kept")
    kept = here / "home" / "weights" / "synthetic"
    kept.mkdir(parents=True)
    (kept / "opt-mini-np").symlink_to(elsewhere)
    (kept / ".opt-mini-np.partial").symlink_to(elsewhere)
    made = store.prepare("opt-mini", str, here / "home")
    assert (elsewhere / "precious").read_text() == "kept" and os.listdir(elsewhere) == ["precious"]
    assert not store.broken_files(made.path / "opt-mini-np", models.resolve("opt-mini"))


# ---- environment variables


@pytest.mark.parametrize("home", ["file", "file/below", "~nobody-of-that-name/x", "x" * 5000])
def test_a_home_that_cannot_be_is_refused_by_its_variable(home, here, capsys, monkeypatch):
    (here / "file").touch()
    monkeypatch.setenv("OFFLOAD_LAB_HOME", home)
    assert_refused(measure(), ["OFFLOAD_LAB_HOME", home[:200]], here, capsys)


@pytest.mark.parametrize("visible", ["", "-1", "banana", "99", "GPU-", "0,0,0,,", "٣", "²", "MIG-x", "\n"])
@pytest.mark.parametrize("device", ["cuda"])
def test_gpus_hidden_by_nonsense_are_no_gpus(visible, device, here, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(lab, "_torch_has_cuda", lambda: True)
    if lab.choose_device("auto") == "cuda":
        pytest.skip("a GPU that CUDA shows for this")
    assert_refused([*measure(), "--device", device], ["cuda"], here, capsys)


# ---- notebooks' parameters, as papermill sets them


PARAMETERS = [
    ({"device": "gpu"}, "'gpu'"),
    ({"device": ""}, "''"),
    ({"device": None}, "None"),
    ({"device": 0}, "0"),
    ({"device": True}, "True"),
    ({"device": ["cuda"]}, "cuda"),
    ({"model": 5}, "5"),
    ({"model": "gpt-2"}, "gpt-2"),
    ({"model": ["opt-1.3b"]}, "opt-1.3b"),
    ({"model": None}, "None"),
    ({"model": 0}, "0"),
    ({"model": "../../x"}, "../../x"),
    ({"page_cache": "warm"}, "warm"),
    ({"page_cache": True}, "True"),
    ({"page_cache": ""}, "page_cache"),
    ({"page_cache": None}, "page_cache"),
    ({"fresh": "yes"}, "'yes'"),
    ({"fresh": "no"}, "'no'"),
    ({"fresh": 1}, "1"),
    ({"fresh": None}, "None"),
    ({"output_dir": 5}, "5"),
    ({"output_dir": None}, "None"),
    ({"output_dir": "/dev/null/x"}, "/dev/null/x"),
    ({"output_dir": "a\0b"}, "null"),
    ({"output_dir": ["x"]}, "x"),
    ({"output_dir": "/proc/x"}, "/proc/x"),
]


@pytest.mark.parametrize("name", [name for name in suite.NOTEBOOKS if name in homework.QUESTIONS])
@pytest.mark.parametrize("parameters, word", PARAMETERS, ids=[str(p)[:40] for p, _ in PARAMETERS])
def test_a_parameter_that_makes_no_sense_stops_the_notebook_before_it_runs_anything(
    parameters, word, name, here, monkeypatch
):
    monkeypatch.setattr(notebook, "display", lambda *shown, **options: None)
    cells = json.loads((suite.NOTEBOOK_FOLDER / suite.NOTEBOOKS[name]).read_text(encoding="utf-8"))["cells"]
    at = next(i for i, cell in enumerate(cells) if "parameters" in cell["metadata"].get("tags", ()))
    given = {"device": "emulated", "output_dir": str(here / "out")} | parameters
    names: dict = {}
    exec("from helpers import analysis, homework, lab, notebook", names)
    exec("from helpers.report import plots, tables", names)
    exec("".join(cells[at]["source"]), names)
    names |= given
    before, started = everything(here), set(psutil.Process().children(recursive=True))
    with pytest.raises(Refused) as refusal:
        for cell in cells[at + 1 :]:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), names)
    assert word in str(refusal.value) and len(str(refusal.value).splitlines()) <= 2
    assert everything(here) == before and set(psutil.Process().children(recursive=True)) <= started


def test_a_parameter_that_no_notebook_has_is_refused(here):
    with pytest.raises(Refused, match="'devcie'"):
        suite.run(["q1"], {"devcie": "cuda"}, here / "out")
    assert not (here / "out").exists()
