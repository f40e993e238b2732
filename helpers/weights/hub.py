"""Download a model from the Hugging Face hub in a child process, which can be killed when a transfer stalls."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from helpers import paths
from helpers.errors import Refused
from helpers.weights import checkpoint
from helpers.weights.checkpoint import CONFIG_FILE, TOKENIZER_FILES, WHOLE_FILES

GB = 10**9  # the hub counts in these

ANSWER_S = 90.0  # to import huggingface_hub, resolve the host and list a repository
# Without a new byte on disk. huggingface_hub writes 10 MiB at a time: slower lines than 90 kB/s count as stalled.
STALL_S = 120.0
REQUEST_TIMEOUT_S = 10.0
ATTEMPTS = 4
LONGEST_WAIT_S = 60.0
PROGRESS_EVERY_S = 10.0


class Unavailable(Refused):
    """The hub can't provide a model; gives the reason in one clause."""


@dataclass(frozen=True)
class Snapshot:
    """A repository's files at one commit, in the hub's own cache."""

    folder: Path
    commit: str


class Failed(Exception):
    """One attempt failed: `kind` is final, again (worth another attempt), connection, stalled, token or disk."""

    def __init__(self, kind: str, reason: str, wait_s: float | None = None, in_cache: str | None = None) -> None:
        super().__init__(reason)
        self.kind, self.wait_s, self.in_cache = kind, wait_s, in_cache


def fetch(
    repo: str,
    say: Callable[[str], None],
    check_space: Callable[[Path, int], None],
    revision: str | None = None,
    stall_s: float = STALL_S,
) -> Snapshot:
    """Put config, tokenizer and weights of `repo` in the hub's cache, reusing the files that are there.

    Calls `check_space(folder, bytes)` before a download; it raises Refused if there is no room. Without a network
    (or with HF_HUB_OFFLINE) uses the cache as it is. Raises Unavailable with the reason.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(paths.ROOT), os.environ.get("PYTHONPATH")))),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    refused_token = ""
    for attempt in range(1, ATTEMPTS + 1):
        listing = None
        try:
            listing = _in_child(["list", repo, revision or ""], environment, ANSWER_S)
            return _download(repo, revision, listing, environment, stall_s, say, check_space)
        except Failed as failure:
            if failure.kind == "token":
                say(f"{repo}: {failure}; trying without it")
                environment["HF_HUB_DISABLE_IMPLICIT_TOKEN"] = "1"
                refused_token = f" ({failure})"
                continue
            if failure.in_cache:
                with suppress(checkpoint.Incomplete):
                    folder = Path(failure.in_cache)
                    checkpoint.weight_files(folder)
                    return Snapshot(folder, commit=folder.name)
            if failure.kind == "disk":
                raise Refused(str(failure)) from failure
            if failure.kind == "final" or (failure.kind == "connection" and listing is None):
                raise Unavailable(f"{failure}{refused_token}") from failure
            if attempt == ATTEMPTS:
                raise Unavailable(f"{failure}; gave up after {ATTEMPTS} attempts") from failure
            if listing is not None:  # the transfer failed; Xet has hung where plain HTTP got through
                environment["HF_HUB_DISABLE_XET"] = "1"
            wait_s = 2.0**attempt if failure.wait_s is None else failure.wait_s
            wait_s = 0.0 if failure.kind == "stalled" else min(wait_s, LONGEST_WAIT_S)
            say(f"{repo}: {failure}; trying again" + (f" in {wait_s:.0f} s" if wait_s else ""))
            time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def wanted_files(names: Collection[str]) -> list[str]:
    """Choose a repository's files to fetch: config, tokenizer, and one set of weights. Empty: no weights."""
    for whole in WHOLE_FILES:
        stem, suffix = whole.rsplit(".", 1)
        shards = sorted(name for name in names if re.fullmatch(rf"{stem}-\d+-of-\d+\.{suffix}", name))
        index = f"{whole}.index.json"
        weights = [whole] if whole in names else [index, *shards] if index in names and shards else []
        if weights:
            return [name for name in (CONFIG_FILE, *TOKENIZER_FILES) if name in names] + weights
    return []


def _download(
    repo: str,
    revision: str | None,
    listing: dict[str, Any],
    environment: dict[str, str],
    stall_s: float,
    say: Callable[[str], None],
    check_space: Callable[[Path, int], None],
) -> Snapshot:
    sizes: dict[str, int] = listing["sizes"]
    wanted = wanted_files(sizes)
    if not wanted:
        raise Failed("final", f"{repo} has no safetensors or .bin weights")
    missing = [name for name in wanted if name not in listing["cached"]]
    missing_bytes = sum(sizes[name] for name in missing)
    check_space(Path(listing["cache"]), missing_bytes)
    if missing:
        say(f"{repo}: downloading {missing_bytes / GB:.2f} GB to {listing['cache']}")
    blobs = Path(listing["blobs"])
    before = _allocated_bytes(blobs)

    def progress() -> int:
        return _allocated_bytes(blobs) - before

    def report(done_bytes: int, mb_per_s: float) -> None:
        say(f"{repo}: {done_bytes / GB:.2f} of {missing_bytes / GB:.2f} GB, {mb_per_s:.1f} MB/s")

    command = ["download", repo, revision or "", *wanted]
    folder = Path(_in_child(command, environment, stall_s, progress, report)["snapshot"])
    for name in missing:
        if name in listing["sha256"] and _sha256(folder / name) != listing["sha256"][name]:
            (folder / name).resolve().unlink()
            raise Failed("again", f"{name} didn't arrive as the hub has it (its SHA-256 differs)")
    return Snapshot(folder, commit=folder.name)


def _in_child(
    arguments: list[str],
    environment: dict[str, str],
    silence_s: float,
    progress: Callable[[], int] = lambda: 0,
    report: Callable[[int, float], None] = lambda done_bytes, mb_per_s: None,
) -> dict[str, Any]:
    """Run this module in a child process; returns its answer. Raises Failed if it fails or stalls for `silence_s`."""
    # A session of its own: Ctrl-C in a terminal reaches only this process, which then ends the child.
    child = subprocess.Popen(
        [sys.executable, "-m", "helpers.weights.hub", *arguments],
        env=environment,
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said: list[str] = []
    listener = threading.Thread(target=lambda: said.extend(child.communicate()), daemon=True)
    assert child.stdin
    stdin, child.stdin = child.stdin, None  # communicate() would close it, and the child leaves when it is closed
    listener.start()
    done_bytes, began_s = 0, time.monotonic()
    changed_s = reported_s = began_s
    try:
        while listener.is_alive():
            listener.join(timeout=0.2)
            now_s, done_before = time.monotonic(), done_bytes
            done_bytes = progress()
            if done_bytes != done_before:
                changed_s = now_s
            elif now_s - changed_s >= silence_s:
                if arguments[0] == "download":
                    raise Failed("stalled", f"no byte for {silence_s:.0f} s")
                raise Failed("connection", f"no answer within {silence_s:.0f} s")
            if now_s - reported_s >= PROGRESS_EVERY_S:
                reported_s = now_s
                report(done_bytes, done_bytes / (now_s - began_s) / 1e6)
    finally:
        with suppress(BrokenPipeError):
            stdin.close()
        try:
            child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            child.kill()
        listener.join()
    try:
        answer = json.loads(said[0].splitlines()[-1])
    except (IndexError, ValueError):
        last = (said[1].strip() or "no message").splitlines()[-1][:200]
        raise Failed("again", f"the download ended with exit code {child.returncode} ({last})") from None
    if "kind" in answer:
        raise Failed(**answer)
    return answer


def _allocated_bytes(folder: Path) -> int:
    # Blocks, not lengths: a transfer may make the file long at once and fill it as it goes.
    total = 0
    with suppress(OSError):
        for file in folder.iterdir():
            with suppress(OSError):
                total += file.stat().st_blocks * 512
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---------------------------------------------------------------- in the child


def _list(repo: str, revision: str | None) -> dict[str, Any]:
    """A repository's files: sizes and hashes, and which of them are in the cache."""
    import huggingface_hub
    from huggingface_hub import constants

    api = huggingface_hub.HfApi()
    found = api.model_info(repo, revision=revision, files_metadata=True, timeout=REQUEST_TIMEOUT_S)
    sizes = {file.rfilename: file.size or 0 for file in found.siblings or ()}
    cached = [name for name in sizes if _in_cache(repo, name, found.sha or "main")]
    return {
        "sizes": sizes,
        "sha256": {file.rfilename: file.lfs.sha256 for file in found.siblings or () if file.lfs},
        "cached": cached,
        "cache": str(constants.HF_HUB_CACHE),
        "blobs": str(Path(constants.HF_HUB_CACHE, f"models--{repo.replace('/', '--')}", "blobs")),
    }


def _get(repo: str, revision: str | None, names: tuple[str, ...]) -> dict[str, Any]:
    """Download files; interrupted ones start over, complete ones are kept."""
    import huggingface_hub

    files = [huggingface_hub.hf_hub_download(repo, name, revision=revision) for name in names]
    return {"snapshot": str(Path(files[0]).parent)}


def _in_cache(repo: str, name: str, commit: str) -> str | None:
    import huggingface_hub

    path = huggingface_hub.try_to_load_from_cache(repo, name, revision=commit)
    return path if isinstance(path, str) else None


def _where_the_token_is() -> str | None:
    """Where the token that was sent comes from; None if none was sent."""
    import huggingface_hub
    from huggingface_hub import constants

    if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN or not huggingface_hub.get_token():
        return None
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(name):
            return f"the environment variable {name}"
    return constants.HF_TOKEN_PATH if os.path.exists(constants.HF_TOKEN_PATH) else "Colab's secrets"


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _failure(error: BaseException, repo: str) -> Failed:
    """Describe a library's exception and its causes in words."""
    from huggingface_hub import constants

    if isinstance(error, Failed):
        return error
    host = constants.ENDPOINT.split("://")[-1]
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    kinds = {base.__name__ for one in chain for base in type(one).__mro__}
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0][:200]

    if "OfflineModeIsEnabled" in kinds:
        return Failed("final", "HF_HUB_OFFLINE is set and its cache does not have the model")
    for one in chain:
        if isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT):
            where = one.filename or constants.HF_HUB_CACHE
            return Failed(
                "disk", f"{where}: the disk is full; free some space, or set HF_HOME to a folder on a larger disk"
            )
        if (status := _status(one)) is not None and status >= 400:
            return _failure_of_status(status, "GatedRepoError" in kinds, one, repo, host)
    if any("Timeout" in kind for kind in kinds):
        return Failed("connection", f"no answer from {host} within {REQUEST_TIMEOUT_S:.0f} s")
    if kinds & {"ConnectError", "ConnectionError", "NetworkError"}:
        return Failed("connection", f"no connection to {host} ({first_line})")
    if "RemoteProtocolError" in kinds:
        return Failed("connection", f"{host} cut the connection")
    if kinds & {"JSONDecodeError", "KeyError", "FileMetadataError"}:
        return Failed("final", f"{host} does not answer as the hub does (a proxy or login page?)")
    return Failed("again", f"{type(error).__name__}: {first_line}")


def _failure_of_status(status: int, gated: bool, error: Any, repo: str, host: str) -> Failed:
    answered = f"{host} answered {status}"
    if status == 429:
        retry_after = error.response.headers.get("Retry-After") or ""
        wait_s = float(retry_after) if retry_after.isdigit() else None
        return Failed("again", f"{answered}: too many requests from this address", wait_s)
    if status >= 500 or status == 408:
        return Failed("again", f"{answered}: it is in trouble")
    if gated or status == 403:
        answered += f": this account may not read {repo} (accept its terms there, set HF_TOKEN)"
    elif status == 401:
        if token := _where_the_token_is():
            return Failed("token", f"{answered}: it refuses the token in {token}")
        answered += f": {repo} doesn't exist, or needs a valid token (HF_TOKEN)"
    elif status == 404:
        answered += f" for {repo}"
    return Failed("final", answered)


def _leave_with_the_parent() -> None:
    sys.stdin.read()  # returns when the parent closes it or dies
    for file in psutil.Process().open_files():
        if file.path.endswith(".incomplete"):  # huggingface_hub never resumes another process's download
            Path(file.path).unlink(missing_ok=True)
    os._exit(1)


def _main(what: str, repo: str, revision: str, *names: str) -> None:
    threading.Thread(target=_leave_with_the_parent, daemon=True).start()
    # The answer has the real stdout to itself: whatever a library prints goes to stderr.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer: dict[str, Any]
    try:
        answer = _list(repo, revision or None) if what == "list" else _get(repo, revision or None, names)
    except ImportError as error:
        answer = {"kind": "final", "reason": f"huggingface_hub can't be imported ({error})"}
    except Exception as error:
        failure = _failure(error, repo)
        config = _in_cache(repo, CONFIG_FILE, revision or "main") if what == "list" else None
        in_cache = config and str(Path(config).parent)
        answer = {"kind": failure.kind, "reason": str(failure), "wait_s": failure.wait_s, "in_cache": in_cache}
    print(json.dumps(answer), file=out, flush=True)
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
