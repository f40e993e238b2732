"""The hub on good days and bad ones, played by a server on 127.0.0.1 to the real huggingface_hub."""

import concurrent.futures
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from hypothesis import given, strategies as st
from safetensors.numpy import save_file

from fake_hub import COMMIT, FakeHub, serving
from helpers import models
from helpers.errors import Refused
from helpers.machine import disks
from helpers.weights import hub, store, synthetic

REPOSITORY = Path(__file__).resolve().parents[1]
REPO = "facebook/opt-tiny"
TINY = models.OptModel("opt-tiny", num_layers=2, hidden_size=64, num_heads=4, vocab_size=1000, max_positions=128)
WEIGHTS = "model.safetensors"
STALL_S = 2.0  # longer than a loaded machine takes between two bytes from itself


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Files of a repository: 4 MiB of weights, so that a transfer can be cut in its middle."""
    folder = tmp_path / "repository"
    folder.mkdir()
    tensors = {}
    for name, shape in TINY.files.items():
        values = np.concatenate(list(synthetic.pieces(name, shape, seed=1))).reshape(shape)
        tensors["model." + name.replace("decoder.layer_norm", "decoder.final_layer_norm")] = values
    save_file(tensors, folder / WEIGHTS, metadata={"padding": "x" * (4 << 20)})
    (folder / "config.json").write_text("{}")
    (folder / "flax_model.msgpack").write_bytes(b"not wanted")
    return folder


@pytest.fixture
def server(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in os.environ if name.startswith("HF_")] + ["TRANSFORMERS_OFFLINE"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    with serving(REPO, repository) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def opt_tiny(monkeypatch: pytest.MonkeyPatch) -> models.OptModel:
    monkeypatch.setitem(models.KNOWN_MODELS, "opt-tiny", TINY)
    return TINY


def room(folder: Path, needed: int) -> None:
    """check_space of a disk with room for everything."""


def without_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits that are asked for, none of them waited."""
    waits: list[float] = []
    monkeypatch.setattr(hub, "time", SimpleNamespace(sleep=waits.append, monotonic=time.monotonic))
    return waits


def quietly(_: str) -> None:
    pass


def fetched(server: FakeHub, method: str = "GET") -> list[str]:
    """Names of the files that were asked for, once each; large ones are redirected to /elsewhere/."""
    paths = [path for m, path, _ in server.requests if m == method and ("/resolve/" in path or "/elsewhere/" in path)]
    return list(dict.fromkeys(path.rsplit("/", 1)[-1] for path in paths))


# ---------------------------------------------------------------- what is fetched


def test_the_files_come_as_they_are_and_only_those_that_are_needed(server, repository, tmp_path):
    asked: list[tuple[Path, int]] = []
    said: list[str] = []
    snapshot = hub.fetch(REPO, said.append, lambda *needed: asked.append(needed))
    assert snapshot.commit == COMMIT
    assert (snapshot.folder / WEIGHTS).read_bytes() == (repository / WEIGHTS).read_bytes()
    assert fetched(server) == ["config.json", WEIGHTS]
    sizes = sum((repository / name).stat().st_size for name in ("config.json", WEIGHTS))
    assert asked == [(tmp_path / "hf" / "hub", sizes)]
    assert len(said) == 1 and "downloading" in said[0]

    server.requests.clear()
    assert hub.fetch(REPO, said.append, room) == snapshot
    assert fetched(server) == [] and len(said) == 1


SHARD_NAMES = [
    f"{stem}-0000{i}-of-00002.{suffix}"
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin"))
    for i in (1, 2)
]
NAMES = [
    "config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
    "README.md",
    "tf_model.h5",
    *SHARD_NAMES,
    *(name + end for name in ("model.safetensors", "pytorch_model.bin") for end in ("", ".index.json")),
]


@given(st.sets(st.sampled_from(NAMES)))
def test_one_set_of_weights_is_wanted_safetensors_first(names):
    wanted = hub.wanted_files(names)
    assert set(wanted) <= names and len(wanted) == len(set(wanted))
    kinds = {name.rsplit(".", 1)[-1] for name in wanted if not name.endswith((".json", ".txt"))}
    assert len(kinds) <= 1
    if "model.safetensors" in names:
        assert kinds == {"safetensors"} and not any(name in wanted for name in SHARD_NAMES)
    if not any(name.startswith(("model", "pytorch_model")) for name in names):
        assert wanted == []
    if wanted:
        assert {name for name in names if name in NAMES[:4]} <= set(wanted)


def test_a_repository_without_weights_is_said_to_have_none(server, repository):
    (repository / WEIGHTS).unlink()
    with pytest.raises(hub.Unavailable, match="no safetensors or .bin"):
        hub.fetch(REPO, print, room)


def test_no_room_is_refused_before_a_byte_is_fetched(server, tmp_path):
    def no_room(folder, needed):
        raise Refused("no room")

    with pytest.raises(Refused, match="no room"):
        hub.fetch(REPO, print, no_room)
    assert fetched(server) == []


# ---------------------------------------------------------------- bad days


def fetch_right(repository: Path, tmp_path: Path, **options) -> list[str]:
    """Fetch, and check that the weights are the repository's and no unfinished file is left. Returns the messages."""
    said: list[str] = []
    snapshot = hub.fetch(REPO, said.append, room, **options)
    assert (snapshot.folder / WEIGHTS).read_bytes() == (repository / WEIGHTS).read_bytes()
    assert list(tmp_path.rglob("*.incomplete")) == []
    return said


def test_a_transfer_that_is_cut_is_finished(server, repository, tmp_path):
    server.faults.append(("GET", WEIGHTS, "cut"))
    fetch_right(repository, tmp_path)


def test_a_transfer_that_stalls_is_killed_and_tried_again(server, repository, tmp_path):
    server.faults.append(("GET", WEIGHTS, "stall"))
    said = fetch_right(repository, tmp_path, stall_s=STALL_S)
    assert any("no byte for 2 s" in line and "trying again" in line for line in said)


def test_a_transfer_that_always_stalls_is_given_up(server, tmp_path):
    server.faults += [("GET", WEIGHTS, "stall")] * hub.ATTEMPTS
    with pytest.raises(hub.Unavailable, match=f"no byte for 1 s; gave up after {hub.ATTEMPTS} attempts"):
        hub.fetch(REPO, quietly, room, stall_s=1.0)
    assert list(tmp_path.rglob("*.incomplete")) == []


def test_a_stalled_xet_transfer_is_tried_again_over_http(server, repository, tmp_path):
    pytest.importorskip("hf_xet")
    server.xet = True
    fetch_right(repository, tmp_path, stall_s=STALL_S)
    asked = [path for _, path, _ in server.requests]
    assert "/xet-token" in asked and f"/elsewhere/{WEIGHTS}" in asked
    assert "/xet-token" not in asked[asked.index(f"/elsewhere/{WEIGHTS}") :]


def test_a_download_ends_with_the_process_that_asked_for_it(server, repository, tmp_path):
    server.faults.append(("GET", WEIGHTS, "stall"))
    script = f"from helpers.weights import hub; hub.fetch({REPO!r}, print, lambda *needed: None)"
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    while not list(tmp_path.rglob("*.incomplete")):
        assert parent.poll() is None
        time.sleep(0.02)
    children = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait()
    assert children and not psutil.wait_procs(children, timeout=30)[1]
    assert list(tmp_path.rglob("*.incomplete")) == []
    fetch_right(repository, tmp_path)


def test_weights_that_always_arrive_damaged_are_not_taken(server, tmp_path, monkeypatch):
    without_waiting(monkeypatch)
    server.faults += [("GET", WEIGHTS, "damaged")] * 10
    with pytest.raises(hub.Unavailable, match=f"{WEIGHTS} didn't arrive .*SHA-256.* gave up after"):
        hub.fetch(REPO, print, room)
    assert len(server.faults) == 10 - hub.ATTEMPTS


def test_two_processes_at_once_both_have_the_file(server, repository, tmp_path):
    with concurrent.futures.ThreadPoolExecutor(2) as two:
        list(two.map(lambda _: fetch_right(repository, tmp_path), range(2)))
    assert server.sent_bytes == (repository / WEIGHTS).stat().st_size


def expired_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> str:
    """Put a token that the hub refuses in the environment or in a file; returns where it is, as a person names it."""
    if where == "environment":
        monkeypatch.setenv("HF_TOKEN", "hf_expired")
        return "HF_TOKEN"
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("hf_expired")
    return str(tmp_path / "hf" / "token")


@pytest.mark.parametrize("where", ["environment", "file"])
def test_an_expired_token_is_named_and_left_out(server, repository, tmp_path, monkeypatch, where):
    named = expired_token(tmp_path, monkeypatch, where)
    server.refused_token = "hf_expired"
    said = fetch_right(repository, tmp_path)
    assert "401" in said[0] and named in said[0] and "without it" in said[0]


def test_an_expired_token_for_a_private_model_is_named(server, tmp_path, monkeypatch):
    named = expired_token(tmp_path, monkeypatch, "environment")
    server.faults += [("GET", "/api/models", (401, {}))] * 2
    with pytest.raises(hub.Unavailable, match=f"401.*{named}"):
        hub.fetch(REPO, print, room)
    assert len(server.requests) == 2


def test_too_many_requests_are_waited_out_as_long_as_the_hub_asks(server, monkeypatch):
    waits = without_waiting(monkeypatch)
    server.faults += [("GET", "/api/models", (429, {"Retry-After": "7"})), ("GET", "/api/models", (429, {}))]
    said: list[str] = []
    assert hub.fetch(REPO, said.append, room).commit == COMMIT
    assert waits[0] == 7 and waits[1] > 0 and "429" in said[0]


def test_a_hub_in_trouble_is_given_up_after_a_few_attempts(server, monkeypatch):
    without_waiting(monkeypatch)
    server.faults += [("GET", "/api/models", (503, {}))] * 10
    with pytest.raises(hub.Unavailable, match=f"503.* gave up after {hub.ATTEMPTS} attempts"):
        hub.fetch(REPO, print, room)
    assert len(server.requests) == hub.ATTEMPTS


@pytest.mark.parametrize(
    "answer, words",
    [
        ((401, {}), "401.*HF_TOKEN"),
        ((403, {}), "403.*may not read"),
        ((403, {"X-Error-Code": "GatedRepo"}), "403.*accept its terms"),
        ((404, {"X-Error-Code": "RepoNotFound"}), "answered 404 for facebook/opt-tiny"),
        ((451, {}), "answered 451"),
        ((200, {"Content-Type": "text/html"}), "does not answer as the hub does"),
        ((200, {}), "does not answer as the hub does"),
    ],
)
def test_an_answer_that_will_not_change_is_said_in_words_at_once(server, answer, words):
    server.faults += [("GET", "/api/models", answer)] * 2
    with pytest.raises(hub.Unavailable, match=words):
        hub.fetch(REPO, print, room)
    assert len(server.requests) == 1


def test_no_network_and_offline_mode_are_told_apart(server, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(hub.Unavailable, match="HF_HUB_OFFLINE is set"):
        hub.fetch(REPO, print, room)
    assert server.requests == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(hub.Unavailable, match="no connection to 127.0.0.1:9"):
        hub.fetch(REPO, print, room)


def test_without_huggingface_hub_that_is_the_reason(server, tmp_path, monkeypatch):
    (tmp_path / "shadow" / "huggingface_hub").mkdir(parents=True)
    (tmp_path / "shadow" / "huggingface_hub" / "__init__.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "shadow"))
    with pytest.raises(hub.Unavailable, match="huggingface_hub can't be imported"):
        hub.fetch(REPO, print, room)


# ---------------------------------------------------------------- as weights


def test_converted_weights_need_neither_hub_nor_cache(server, opt_tiny, tmp_path):
    prepared = store.prepare("opt-tiny", print, tmp_path / "home")
    assert prepared.source == f"hub: facebook/opt-tiny@{COMMIT}"
    for name, shape in TINY.files.items():
        expected = np.concatenate(list(synthetic.pieces(name, shape, seed=1))).reshape(shape)
        np.testing.assert_array_equal(np.load(prepared.path / "opt-tiny-np" / name), expected)
    server.requests.clear()
    (tmp_path / "hf").rename(tmp_path / "elsewhere")
    said: list[str] = []
    assert store.prepare("opt-tiny", said.append, tmp_path / "home") == prepared
    assert server.requests == [] and said == []


def test_the_hubs_cache_serves_without_the_network(server, opt_tiny, tmp_path, monkeypatch):
    hub.fetch(REPO, print, room)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    prepared = store.prepare("opt-tiny", print, tmp_path / "home")
    assert prepared.source == f"hub: facebook/opt-tiny@{COMMIT}"


def test_a_cache_with_a_config_only_is_no_model(server, opt_tiny, tmp_path, monkeypatch):
    snapshot = hub.fetch(REPO, print, room)
    (snapshot.folder / WEIGHTS).unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(hub.Unavailable, match="HF_HUB_OFFLINE is set"):
        hub.fetch(REPO, print, room)


def test_broken_hub_weights_without_the_network_are_refused(server, opt_tiny, tmp_path, monkeypatch):
    target = store.prepare("opt-tiny", print, tmp_path / "home").path / "opt-tiny-np"
    os.truncate(target / "decoder.layers.0.fc1.weight", 100)
    (tmp_path / "hf").rename(tmp_path / "elsewhere")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Refused) as refusal:
        store.prepare("opt-tiny", print, tmp_path / "home")
    assert "decoder.layers.0.fc1.weight" in str(refusal.value) and "no connection" in str(refusal.value)


def test_without_the_hub_the_weights_are_synthetic_and_say_why(server, opt_tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said: list[str] = []
    prepared = store.prepare("opt-tiny", said.append, tmp_path / "home")
    assert prepared.source.startswith("synthetic: random, seed 0, real model's scale (hub: HF_HUB_OFFLINE is set")
    assert "synthetic" in said[0]
    monkeypatch.delenv("HF_HUB_OFFLINE")  # the network is back: the real ones, and the synthetic ones stay apart
    assert store.prepare("opt-tiny", said.append, tmp_path / "home").source.startswith("hub: ")
    assert (prepared.path / "opt-tiny-np").is_dir()


def test_the_emulated_model_asks_no_hub(server, tmp_path):
    assert store.prepare("opt-mini", print, tmp_path / "home").source.startswith("synthetic: ")
    assert server.requests == []


def test_both_disks_are_asked_for_the_download_and_the_conversion(server, opt_tiny, tmp_path, monkeypatch):
    """The cache and the converted weights are on one disk here: it must hold both."""
    download = 4 << 20
    monkeypatch.setattr(disks, "free_bytes", lambda path: download + (1 << 18))
    with pytest.raises(Refused, match="iB are needed in .*hf.* and .*home"):
        store.prepare("opt-tiny", print, tmp_path / "home")
    assert fetched(server) == []
