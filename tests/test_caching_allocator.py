"""What `torch.cuda.max_memory_allocated` counts: blocks of CUDA's caching allocator, not tensors."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, strategies as st

from helpers.engine.caching_allocator import CachingAllocator
from helpers.units import MIB


def storage(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8).untyped_storage()


def counted(memory, *sizes, stream=None):
    """Allocate storages of these sizes; returns them, to be held."""
    held = [storage(size) for size in sizes]
    for one in held:
        memory.add(one, stream)
    return held


@given(st.lists(st.integers(0, MIB), min_size=1, max_size=20))
def test_small_storages_take_their_bytes_rounded_up_to_512(sizes):
    memory = CachingAllocator()
    held = counted(memory, *sizes)
    expected = sum(-(-size // 512) * 512 for size in sizes)
    assert memory.allocated == memory.peak == expected
    held.clear()
    assert memory.allocated == 0 and memory.peak == expected


@pytest.mark.parametrize(
    "size, reserved, allocated",
    [
        (1, 2 * MIB, 512),
        (MIB, 2 * MIB, MIB),
        (MIB + 1, 20 * MIB, MIB + 512),
        (10 * MIB - 512, 20 * MIB, 10 * MIB - 512),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB, 10 * MIB + 512),  # over 1 MiB would be left: split
        (11 * MIB, 12 * MIB, 12 * MIB),  # 1 MiB would be left: the whole segment
        (19 * MIB + 512, 20 * MIB, 20 * MIB),
    ],
)
def test_a_storage_takes_a_block_of_a_segment(size, reserved, allocated):
    memory = CachingAllocator()
    held = counted(memory, size)
    assert (memory.reserved, memory.allocated) == (reserved, allocated) and held


def test_a_block_is_not_split_if_little_would_be_left():
    memory = CachingAllocator()
    held = counted(memory, 6 * MIB, 4 * MIB, 4 * MIB, 6 * MIB)  # one segment of 20 MiB
    assert memory.reserved == 20 * MIB
    del held[1]
    again = counted(memory, 3 * MIB + 512)  # of the 4 MiB, less than 1 MiB would be left
    assert memory.allocated == 20 * MIB and memory.reserved == 20 * MIB and again


def test_neighbours_that_are_free_become_one():
    memory = CachingAllocator()
    held = counted(memory, 5 * MIB, 5 * MIB, 5 * MIB, 5 * MIB)
    del held[1:3]
    again = counted(memory, 9 * MIB + 512)
    assert memory.reserved == 20 * MIB and again


def test_each_stream_has_its_own_blocks():
    memory = CachingAllocator()
    counted(memory, 4 * MIB, stream="a")  # freed at once
    held = counted(memory, 4 * MIB, stream="b")
    assert memory.reserved == 40 * MIB and held


def test_a_storage_is_counted_once_until_its_last_view_is_gone():
    memory = CachingAllocator()
    tensor = torch.empty(1024, dtype=torch.uint8)
    for view in (tensor, tensor[:8].view(2, 4)):
        memory.add(view.untyped_storage())
    assert memory.allocated == 1024
    del tensor
    assert memory.allocated == 1024
    del view
    assert memory.allocated == 0


@pytest.mark.parametrize("capacity, fits", [(40 * MIB, True), (39 * MIB, False)])
def test_more_than_the_capacity_is_out_of_memory_in_cudas_words(capacity, fits):
    memory = CachingAllocator(capacity)
    held = counted(memory, 15 * MIB)
    if fits:
        held += counted(memory, 20 * MIB)
        return
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory. Tried to allocate 24.00 MiB"):
        counted(memory, 23 * MIB)


def test_free_segments_are_given_back_before_memory_is_out():
    memory = CachingAllocator(20 * MIB)
    counted(memory, 15 * MIB)  # freed at once, its segment kept
    held = counted(memory, 20 * MIB)
    assert memory.reserved == 20 * MIB and held


@given(st.lists(st.tuples(st.integers(1, 30 * MIB), st.booleans()), max_size=25))
def test_whatever_comes_and_goes_the_books_balance(steps):
    memory, held = CachingAllocator(), []
    for size, keep in steps:
        new = counted(memory, size)
        held += new if keep else []
        new = None
        assert sum(one.nbytes() for one in held) <= memory.allocated <= memory.reserved
        assert memory.allocated <= memory.peak <= memory.peak_reserved
    held.clear()
    new = None
    assert memory.allocated == 0


def test_threads_may_allocate_at_once():
    memory = CachingAllocator()

    def allocate():
        for _ in range(300):
            counted(memory, 100)

    threads = [threading.Thread(target=allocate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory.allocated == 0
