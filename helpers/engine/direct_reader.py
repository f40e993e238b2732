"""`--disk-reader direct`: weights of the disk tier by O_DIRECT, past the page cache, through small pinned buffers.

FlexGen reads a weight through a memory map, page by page, one thread a tensor, and passes it on through a buffer of
fp16, whatever its type. Here a weight is cut into parts of a few MiB that all copy threads share; each part is read
into a pinned buffer in one request and copied to the GPU as the bytes it is, while the thread reads its next part.
FlexGen still chooses the tensors, their order and when it waits for them.
"""

from __future__ import annotations

import errno
import mmap
import os
import queue as queues
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

ALIGNMENT = 4096  # of offset, length and memory of an O_DIRECT read: enough for any block size in use
PART_BYTES = 4 * 2**20
# Vectors (biases, norms) are a thousandth of a model's bytes and more than half of its files: a request to the disk
# for each would cost more than it moves. They come through the page cache.
SMALLEST_DIRECT_BYTES = 64 * 2**10
LEAST_WORTH_A_NOTE = 0.02
BUFFERS = 2  # per copy thread: one is being filled while the other is copied from
BUFFER_BYTES = PART_BYTES + ALIGNMENT


@dataclass(frozen=True)
class Part:
    """A piece of a weight: `length` bytes of a file, all but the first `skip` (its header) for `destination`."""

    path: str
    flags: int
    offset: int
    length: int
    skip: int
    destination: Any  # bytes on the GPU


def cut(header: int, payload: int, part_bytes: int = PART_BYTES) -> list[tuple[int, int]]:
    """Where a file of a header and a payload is cut, as (offset, length): aligned parts of about one size, the
    whole file among them, of `part_bytes` at most plus one block for the header.
    """
    parts = max(-(-payload // part_bytes), 1)
    each = -(-(header + payload) // (parts * ALIGNMENT)) * ALIGNMENT
    end = header + payload
    return [(offset, min(each, end - offset)) for offset in range(0, end, each)]


class DirectReader:
    """Reads the chosen tensors from FlexGen's disk; FlexGen's copy threads do everything else on their queue.

    `notes` lists what could not be done as asked. `after_read` is called with the bytes of each read.
    """

    def __init__(self, after_read: Callable[[int], None] = lambda nbytes: None) -> None:
        self.notes: list[str] = []
        self.after_read = after_read

    def take_over(self, disk: Any, weights: Iterable[Any]) -> None:
        """From now on, cut copies of these tensors, which FlexGen has written, into parts for the copy threads."""
        sizes = {weight.data: int(weight.bytes) for weight in weights}
        flags = self._flags(max(sizes, key=sizes.__getitem__)) if sizes else 0
        small = sum(size for size in sizes.values() if size < SMALLEST_DIRECT_BYTES) / max(sum(sizes.values()), 1)
        if flags != os.O_RDONLY and small > LEAST_WORTH_A_NOTE:
            self.notes.append(
                f"direct disk reader: {100 * small:.0f} % of the weights on disk are in tensors of less than "
                f"{SMALLEST_DIRECT_BYTES // 2**10} KiB, which were read through the page cache"
            )
        submit_stock = disk.submit_copy

        def submit_copy(dst: Any, dst_indices: Any, src: Any, src_indices: Any) -> None:
            payload = sizes.get(src.data) if src.device is disk else None
            if payload is None or int(dst.bytes) != payload:
                submit_stock(dst, dst_indices, src, src_indices)
                return
            for part in _parts(src.data, payload, dst.data, flags):
                disk.copy_queue.put_nowait(part)

        disk.submit_copy = submit_copy

    def _flags(self, path: str) -> int:
        """Flags to open weights with: O_DIRECT if the file system supports it."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                with mmap.mmap(-1, ALIGNMENT) as page:
                    os.preadv(file, [page], 0)
            finally:
                os.close(file)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self.notes.append(
                f"direct disk reader: the file system of {os.path.dirname(path)} has no O_DIRECT; "
                "weights were read through the page cache"
            )
            return os.O_RDONLY
        return os.O_RDONLY | os.O_DIRECT


def _parts(path: str, payload: int, destination: Any, flags: int) -> list[Part]:
    import torch

    header = os.stat(path).st_size - payload  # a .npy file ends with its values
    if payload < SMALLEST_DIRECT_BYTES:
        flags = os.O_RDONLY
    target = destination.view(torch.uint8).view(-1)
    parts = []
    for offset, length in cut(header, payload):
        skip = max(header - offset, 0)
        first = offset + skip - header
        parts.append(Part(path, flags, offset, length, skip, target[first : first + length - skip]))
    return parts


class PartQueue:
    """One copy thread's view of FlexGen's copy queue: it handles parts itself and returns all other items."""

    def __init__(self, queue: queues.Queue, reader: DirectReader) -> None:
        self.task_done = queue.task_done
        self._queue = queue
        self._reader = reader
        self._buffers: list[Any] = []
        self._copying: list[Any] = []  # an event for each copy that has been started and not waited for

    def get(self) -> Any:
        """FlexGen's next own item."""
        while True:
            item = self._next()
            if not isinstance(item, Part):
                self._finish_all()
                return item
            self._serve(item)
            del item  # while it waits, a thread holds nothing on the GPU

    def _next(self) -> Any:
        try:
            return self._queue.get_nowait()
        except queues.Empty:
            self._finish_all()
            return self._queue.get()

    def _serve(self, part: Part) -> None:
        import torch

        if len(self._copying) == BUFFERS:
            self._finish_oldest()
        buffer = self._free_buffer()
        read_part(part, buffer)
        self._reader.after_read(part.length)
        part.destination.copy_(buffer[part.skip : part.length], non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._copying.append(copied)

    def _finish_all(self) -> None:
        while self._copying:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        self._copying.pop(0).synchronize()
        self._queue.task_done()

    def _free_buffer(self) -> Any:
        """The buffer whose copy started longest ago; each thread creates its own."""
        if not self._buffers:
            self._buffers = aligned_buffers(BUFFERS, BUFFER_BYTES)
        self._buffers.append(self._buffers.pop(0))
        return self._buffers[-1]


def aligned_buffers(count: int, nbytes: int, pin: bool = True) -> list[Any]:
    """Buffers whose memory is aligned for O_DIRECT; `nbytes` is a multiple of the alignment."""
    import torch

    memory = torch.empty(count * nbytes + ALIGNMENT, dtype=torch.uint8, pin_memory=pin)
    start = -memory.data_ptr() % ALIGNMENT
    return [memory[start + i * nbytes : start + (i + 1) * nbytes] for i in range(count)]


def read_part(part: Part, buffer: Any) -> None:
    """Read a part to the start of a buffer. Raises OSError, with the file's name, if the file has not all of it."""
    # Whole blocks are asked for; what is past the end of the file does not come.
    view = memoryview(buffer.numpy())[: -(-part.length // ALIGNMENT) * ALIGNMENT]
    file = os.open(part.path, part.flags)
    try:
        done = 0
        while done < part.length:
            got = os.preadv(file, [view[done:]], part.offset + done)
            if got <= 0:
                raise OSError(errno.EIO, "ends before its tensor does", part.path)
            done += got
    finally:
        os.close(file)
