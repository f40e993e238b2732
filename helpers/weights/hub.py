"""A model's files from the Hugging Face hub, fetched by a process of its own: one that stalls can be stopped."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers import paths
from helpers.errors import Refused
from helpers.weights import checkpoint
from helpers.weights.checkpoint import CONFIG_FILE, TOKENIZER_FILES, WHOLE_FILES

GB = 10**9  # the hub counts in these

ANSWER_S = 90.0  # to start, look up the host and say what a repository holds
STALL_S = 60.0  # without one new byte on disk
REQUEST_TIMEOUT_S = 10.0
ATTEMPTS = 4  # in a row that bring nothing new
LONGEST_WAIT_S = 60.0
PROGRESS_EVERY_S = 10.0
# huggingface_hub writes in pieces of 10 MiB: on a slow line too long between two signs of life.
PIECE_BYTES = 1 << 20
# In the hub's cache, beside the finished files. Of huggingface_hub's own unfinished files each attempt has a new one.
PART = ".offload-lab.incomplete"

# What huggingface_hub speeds transfers up with; both have hung where plain HTTP went through.
UNACCELERATED = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_ENABLE_HF_TRANSFER": "0"}


class Unavailable(Refused):
    """The hub did not give a model; says why in one clause."""


@dataclass(frozen=True)
class Snapshot:
    """Files of a repository at one commit, in the hub's ordinary cache."""

    folder: Path
    commit: str


@dataclass(frozen=True)
class Failure:
    """Why an attempt ended: `kind` is final, again (worth another attempt), connection, stalled or disk."""

    kind: str
    reason: str
    wait_s: float | None = None


class Damaged(Exception):
    """A file that came is not the one of the hub."""


@dataclass(frozen=True)
class Attempt:
    """What came of one attempt; `missing_bytes` were so at its end, if it brought any."""

    snapshot: Snapshot | None = None
    failure: Failure | None = None
    answered: bool = True
    missing_bytes: float = math.inf


def fetch(
    repo: str,
    say: Callable[[str], None],
    check_space: Callable[[Path, int], None],
    revision: str | None = None,
    stall_s: float = STALL_S,
) -> Snapshot:
    """Config, tokenizer and weights of `repo` in the hub's cache; what is there already is not fetched again.

    An attempt goes on where the one before it ended, be it of this call or of a process that was killed.
    `check_space(folder, bytes)` is asked before a download and raises Refused if there is no room. Without the
    network (or with HF_HUB_OFFLINE) the cache is used as it is. Raises Unavailable with the reason.
    """
    accelerated, left, fewest_missing_bytes = True, ATTEMPTS, math.inf
    while True:
        attempt = _attempt(repo, revision, accelerated, stall_s, say, check_space)
        if attempt.snapshot:
            return attempt.snapshot
        failure = attempt.failure
        assert failure is not None
        if failure.kind == "disk":
            raise Refused(failure.reason)
        left = ATTEMPTS if attempt.missing_bytes < fewest_missing_bytes else left - 1
        fewest_missing_bytes = min(fewest_missing_bytes, attempt.missing_bytes)
        if failure.kind == "final" or (failure.kind == "connection" and not attempt.answered):
            raise Unavailable(failure.reason)
        if left <= 0:
            raise Unavailable(f"{failure.reason}; gave up after {ATTEMPTS} attempts")
        if attempt.answered:  # then it was the transfer that failed
            accelerated = False
        wait_s = 2.0 ** (ATTEMPTS - left) if failure.wait_s is None else failure.wait_s
        wait_s = 0.0 if failure.kind == "stalled" else min(wait_s, LONGEST_WAIT_S)
        say(f"{repo}: {failure.reason}; trying again" + (f" in {wait_s:.0f} s" if wait_s else ""))
        time.sleep(wait_s)


def wanted_files(names: Collection[str]) -> list[str]:
    """Of a repository's file names those to fetch: config, tokenizer, and one set of weights. Empty: no weights."""
    for whole in WHOLE_FILES:
        stem, suffix = whole.rsplit(".", 1)
        shards = sorted(name for name in names if re.fullmatch(rf"{stem}-\d+-of-\d+\.{suffix}", name))
        index = f"{whole}.index.json"
        weights = [whole] if whole in names else [index, *shards] if index in names and shards else []
        if weights:
            return [name for name in (CONFIG_FILE, *TOKENIZER_FILES) if name in names] + weights
    return []


def _attempt(
    repo: str,
    revision: str | None,
    accelerated: bool,
    stall_s: float,
    say: Callable[[str], None],
    check_space: Callable[[Path, int], None],
) -> Attempt:
    with _child(repo, revision, accelerated) as (messages, go):
        answer = _next(messages, ANSWER_S)
        if answer is None:
            failure = Failure("connection", f"no answer within {ANSWER_S:.0f} s")
            return Attempt(failure=failure, answered=False)
        if "failure" in answer:
            with suppress(TypeError, KeyError, checkpoint.Incomplete):
                folder = Path(answer["in_cache"])
                checkpoint.weight_files(folder)
                return Attempt(Snapshot(folder, commit=folder.name))
            return Attempt(failure=Failure(**answer["failure"]), answered=False)
        sizes: dict[str, int] = answer["sizes"]
        wanted = wanted_files(sizes)
        if not wanted:
            return Attempt(failure=Failure("final", f"{repo} has no safetensors or .bin weights"))
        missing = sum(sizes[name] for name in wanted if name not in answer["cached"])
        partly = sum(answer["parts"].get(name, 0) for name in wanted)
        check_space(Path(answer["cache"]), missing - partly)
        if partly:
            say(f"{repo}: the download goes on at {partly / GB:.2f} of {missing / GB:.2f} GB, to {answer['cache']}")
        elif missing:
            say(f"{repo}: downloading {missing / GB:.2f} GB to {answer['cache']}")
        go(wanted)
        return _watch(messages, repo, missing, partly, stall_s, say, answer["commit"])


def _watch(
    messages: queue.Queue[dict[str, Any]],
    repo: str,
    missing: int,
    partly: int,
    stall_s: float,
    say: Callable[[str], None],
    commit: str,
) -> Attempt:
    """Follow a download until it is done, fails, or for `stall_s` neither brings a byte to the disk nor checks one."""
    on_disk, checked = partly, 0
    started = said_at = changed_at = time.monotonic()

    def failed(**failure: Any) -> Attempt:
        return Attempt(failure=Failure(**failure), missing_bytes=missing - on_disk if on_disk > partly else math.inf)

    while True:
        message = _next(messages, stall_s)
        now = time.monotonic()
        if message is None:
            return failed(kind="stalled", reason=f"no byte for {stall_s:.0f} s")
        if "failure" in message:
            return failed(**message["failure"])
        if "snapshot" in message:
            return Attempt(Snapshot(Path(message["snapshot"]), commit))
        if (message["on_disk"], message["checked"]) != (on_disk, checked):
            on_disk, checked, changed_at = message["on_disk"], message["checked"], now
        elif now - changed_at >= stall_s:
            return failed(kind="stalled", reason=f"no byte for {stall_s:.0f} s")
        if now - said_at >= PROGRESS_EVERY_S:
            said_at = now
            rate = max(0, on_disk - partly) / (now - started) / 1e6
            say(f"{repo}: {on_disk / GB:.2f} of {missing / GB:.2f} GB, {rate:.1f} MB/s")


def _next(messages: queue.Queue[dict[str, Any]], timeout_s: float) -> dict[str, Any] | None:
    try:
        return messages.get(timeout=timeout_s)
    except queue.Empty:
        return None


@contextmanager
def _child(
    repo: str, revision: str | None, accelerated: bool
) -> Iterator[tuple[queue.Queue[dict[str, Any]], Callable[[list[str]], None]]]:
    """The process that downloads: its messages, and `go(names)`, which it waits for. Gone when this ends."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(paths.ROOT), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **({} if accelerated else UNACCELERATED),
    }
    messages: queue.Queue[dict[str, Any]] = queue.Queue()
    with tempfile.TemporaryFile() as complaints:
        # A session of its own: Ctrl-C in a terminal reaches only us, and we stop it in order.
        child = subprocess.Popen(
            [sys.executable, "-m", "helpers.weights.hub", repo, revision or ""],
            env=environment,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
        )
        assert child.stdin and child.stdout

        def listen(lines: Any) -> None:
            for line in lines:
                if line.endswith("\n"):
                    messages.put(json.loads(line))
            child.wait()
            complaints.seek(0)
            last = (complaints.read().decode(errors="replace").strip() or "no message").splitlines()[-1]
            reason = f"the download ended with exit code {child.returncode} ({last})"
            messages.put({"failure": {"kind": "again", "reason": reason}})

        listener = threading.Thread(target=listen, args=(child.stdout,), daemon=True)
        listener.start()

        def go(names: list[str]) -> None:
            with suppress(BrokenPipeError):  # how the child ended is among its messages
                child.stdin.write(json.dumps(names) + "\n")
                child.stdin.flush()

        try:
            yield messages, go
        finally:
            with suppress(BrokenPipeError):
                child.stdin.close()  # it then leaves, and of what is unfinished only parts stay
            try:
                child.wait(timeout=5)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            listener.join()
            child.stdout.close()


# ---------------------------------------------------------------- in the child


def _download(repo: str, revision: str | None, tell: Callable[[dict[str, Any]], None]) -> None:
    try:
        import huggingface_hub
        from huggingface_hub import constants
    except ImportError as error:
        tell({"failure": {"kind": "final", "reason": f"huggingface_hub cannot be imported ({error})"}})
        return
    constants.DOWNLOAD_CHUNK_SIZE = PIECE_BYTES

    def cached(name: str, commit: str) -> str | None:
        path = huggingface_hub.try_to_load_from_cache(repo, name, revision=commit)
        return path if isinstance(path, str) else None

    try:
        info = huggingface_hub.HfApi().model_info(
            repo, revision=revision, files_metadata=True, timeout=REQUEST_TIMEOUT_S
        )
    except Exception as error:
        config = cached(CONFIG_FILE, revision or "main")
        tell({"failure": _failure(error, repo), "in_cache": config and str(Path(config).parent)})
        return
    blobs = Path(constants.HF_HUB_CACHE, f"models--{repo.replace('/', '--')}", "blobs")
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    hashes = {file.rfilename: file.lfs.sha256 for file in info.siblings or () if file.lfs}  # weights have one
    there = [name for name in sizes if cached(name, info.sha)]
    parts = {}
    for name in hashes.keys() - there:
        whole = blobs / hashes[name]  # and not linked yet, if it is there
        part = whole if whole.exists() else _part(whole)
        parts[name] = _usable_bytes(part, sizes[name])
    tell({"commit": info.sha, "sizes": sizes, "cached": there, "parts": parts, "cache": str(constants.HF_HUB_CACHE)})
    names = json.loads(sys.stdin.readline() or "[]")
    if not names:
        return
    progress = {"finished": 0, "checked": 0}
    threading.Thread(target=_leave_with_the_parent, daemon=True).start()
    threading.Thread(target=_report_growth, args=(progress, tell), daemon=True).start()
    try:
        for name in names:
            if name in hashes and name not in there:
                url = huggingface_hub.hf_hub_url(repo, name, revision=info.sha)
                _fetch_blob(url, blobs / hashes[name], sizes[name], hashes[name], progress)
            # What is among the blobs is only linked, not fetched.
            # Asked for by branch, the config leaves a note of the branch's commit: it is found without the network.
            file = huggingface_hub.hf_hub_download(repo, name, revision=revision if name == CONFIG_FILE else info.sha)
            if name not in there:
                progress["finished"] += sizes[name]
        tell({"snapshot": str(Path(file).parent)})
    except Exception as error:
        tell({"failure": _failure(error, repo)})


def _fetch_blob(url: str, blob: Path, size: int, sha256: str, progress: dict[str, int]) -> None:
    """A file of `size` bytes as `blob`, from where its part ends. Raises Damaged if it is not what the hub has."""
    try:
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.file_download import (
            build_hf_headers,
            get_hf_file_metadata,
            http_get,
            is_xet_available,
            xet_get,
        )
    except ImportError:  # not all are documented: without them hf_hub_download fetches the file, from byte 0 each time
        return
    metadata = get_hf_file_metadata(url)
    if metadata.etag != sha256:  # hf_hub_download would look for it under another name
        return
    blob.parent.mkdir(parents=True, exist_ok=True)
    part = _part(blob)
    with part.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another process may be fetching the same file
        if blob.exists():
            part.unlink(missing_ok=True)
            return
        start = _usable_bytes(part, size)
        file.truncate(start)
        file.seek(start)
        headers = build_hf_headers()
        # An accelerated transfer begins at byte 0, but writes in order: plain HTTP can go on where it ended.
        if metadata.xet_file_data and is_xet_available() and start == 0:
            xet_get(incomplete_path=part, xet_file_data=metadata.xet_file_data, headers=headers, expected_size=size)
        else:
            headers["Accept-Encoding"] = "identity"  # compressed, a file cannot be had from its middle on
            try:
                http_get(url, file, resume_size=start, headers=headers, expected_size=size)
            except HfHubHTTPError as error:
                if error.response.status_code != 416:
                    raise
                os.truncate(part, 0)
                raise Damaged(f"{url} cannot be gone on with from byte {start}") from error
        file.flush()
        if _sha256(part, progress) != sha256:
            os.truncate(part, 0)
            raise Damaged(f"{url} did not arrive as the hub has it (its SHA-256 is another)")
        part.rename(blob)


def _part(blob: Path) -> Path:
    return blob.with_name(blob.name + PART)


def _usable_bytes(part: Path, size: int) -> int:
    """Bytes from the start of a part that can be gone on from: up to its first hole, none if it is too long."""
    try:
        with part.open("rb") as file:
            written = os.lseek(file.fileno(), 0, os.SEEK_HOLE)
    except OSError:  # not there, or empty
        return 0
    return written if written <= size else 0


def _sha256(path: Path, progress: dict[str, int]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            progress["checked"] += len(piece)
    return digest.hexdigest()


def _leave_with_the_parent() -> None:
    sys.stdin.read()  # returns when the parent closes it, or is gone
    for file in _unfinished_files():
        if not file.name.endswith(PART):
            file.unlink(missing_ok=True)
    os._exit(1)


def _report_growth(progress: dict[str, int], tell: Callable[[dict[str, Any]], None]) -> None:
    while True:
        time.sleep(0.2)
        # Blocks, not length: an accelerated transfer may make the file long at once and fill it as it goes.
        on_disk = progress["finished"] + sum(_allocated_bytes(file) for file in _unfinished_files())
        tell({"on_disk": on_disk, "checked": progress["checked"]})


def _unfinished_files() -> set[Path]:
    """The `.incomplete` files this process has open: a part, or huggingface_hub's own for a small file."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            file = Path(os.readlink(descriptor))
        except OSError:
            continue
        if file.suffix == ".incomplete":
            found.add(file)
    return found


def _allocated_bytes(file: Path) -> int:
    try:
        return file.stat().st_blocks * 512
    except OSError:
        return 0


def _failure(error: BaseException, repo: str) -> dict[str, Any]:
    """What happened in words, from the exception and those it came from."""
    from huggingface_hub import constants

    host = constants.ENDPOINT.split("://")[-1]
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    kinds = [base.__name__ for one in chain for base in type(one).__mro__]
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]

    if isinstance(error, Damaged):
        return {"kind": "again", "reason": str(error)}
    if "OfflineModeIsEnabled" in kinds:
        return {"kind": "final", "reason": "HF_HUB_OFFLINE is set and its cache does not have the model"}
    for one in chain:
        if isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT):
            where = one.filename or constants.HF_HUB_CACHE
            advice = "free some space, or set HF_HOME to a folder on a larger disk"
            return {"kind": "disk", "reason": f"{where}: the disk is full; {advice}"}
        response = getattr(one, "response", None)
        status = getattr(response, "status_code", None)
        if status is not None and status >= 400:
            retry_after = response.headers.get("Retry-After")
            return _failure_of_status(status, "GatedRepoError" in kinds, retry_after, repo, host)
    if any("Timeout" in kind for kind in kinds):
        return {"kind": "connection", "reason": f"no answer from {host} within {REQUEST_TIMEOUT_S:.0f} s"}
    if any(kind in ("ConnectError", "ConnectionError", "NetworkError") for kind in kinds):
        return {"kind": "connection", "reason": f"no connection to {host} ({first_line})"}
    if "RemoteProtocolError" in kinds:
        return {"kind": "connection", "reason": f"{host} cut the connection"}
    if any(kind in ("JSONDecodeError", "KeyError", "FileMetadataError") for kind in kinds):
        return {"kind": "final", "reason": f"{host} does not answer as the hub does (a proxy or login page?)"}
    return {"kind": "again", "reason": f"{type(error).__name__}: {first_line}"}


def _failure_of_status(status: int, gated: bool, retry_after: str | None, repo: str, host: str) -> dict[str, Any]:
    if status == 429:
        wait_s = float(retry_after) if retry_after and retry_after.isdigit() else None
        reason = f"{host} answered 429, too many requests from this address"
        return {"kind": "again", "reason": reason, "wait_s": wait_s}
    if status >= 500 or status == 408:
        return {"kind": "again", "reason": f"{host} answered {status}, it is in trouble"}
    if gated or status == 403:
        reason = f"{host} answered {status}, this account may not read {repo} (accept its terms there, set HF_TOKEN)"
    elif status == 401:
        reason = f"{host} answered 401, {repo} is not there, or not without a valid token (HF_TOKEN)"
    elif status == 404:
        reason = f"{host} answered 404 for {repo}"
    else:
        reason = f"{host} answered {status}"
    return {"kind": "final", "reason": reason}


def _main() -> None:
    # Messages have the real stdout to themselves: what a library prints goes to stderr.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    lock = threading.Lock()

    def tell(message: dict[str, Any]) -> None:
        with lock:
            out.write(json.dumps(message) + "\n")
            out.flush()

    _download(sys.argv[1], sys.argv[2] or None, tell)


if __name__ == "__main__":
    _main()
