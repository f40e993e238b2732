"""The emulated GPU: CUDA's rules, a CPU's results, CUDA's memory statistics, and a booked time for what has a rate."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F

from factories import done, mini, run_one
from helpers.engine import emulated_gpu
from helpers.engine.emulated_gpu import EmulatedCudaTensor, EmulatedGpu
from helpers.machine.emulation import EMULATED_T4
from helpers.models import EMULATED_MODEL
from helpers.settings import Workload


@pytest.fixture
def gpu():
    gpu = EmulatedGpu(EMULATED_T4)
    with gpu.on_this_thread():
        yield gpu


@pytest.fixture
def pacer(gpu):
    """Books what the GPU does, and waits for nothing."""
    gpu.pacer._sleep = lambda seconds: None
    gpu.pacer.begin()
    gpu.pacer.next_pass()
    return gpu.pacer


def on_gpu(*shape, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.rand(*shape).to(dtype).cuda()


# ---- what a tensor there is


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty((2, 3), device="cuda"),
        lambda: torch.empty((2, 3), device=torch.device("cuda:0")),
        lambda: torch.ones((2, 3), dtype=torch.bool, device="cuda:0"),
        lambda: torch.arange(3, device="cuda:0"),
        lambda: torch.rand(2, 3).cuda(),
        lambda: on_gpu(2, 3)[1:],
        lambda: on_gpu(2, 3) + 1,
        lambda: on_gpu(2, 3).half().cuda(),
    ],
)
def test_it_says_that_it_is_on_cuda(gpu, make):
    tensor = make()
    assert isinstance(tensor, EmulatedCudaTensor)
    assert tensor.device == torch.device("cuda:0") and tensor.is_cuda


def test_its_shape_is_one_of_torchs(gpu):
    assert type(on_gpu(2, 3).shape) is type(on_gpu(2, 3).size()) is torch.Size


def test_what_is_on_the_host_stays_there(gpu):
    for tensor in (torch.empty(3), torch.empty(3, device="cpu"), on_gpu(3).cpu(), torch.empty(3, pin_memory=True)):
        assert type(tensor) is torch.Tensor and tensor.device.type == "cpu" and not tensor.is_cuda


def test_the_host_knows_what_it_pinned(gpu):
    assert torch.empty(3, pin_memory=True).is_pinned() and torch.empty(3).pin_memory().is_pinned()
    assert not torch.empty(3).is_pinned() and not torch.empty(3, pin_memory=False).is_pinned()


def test_pinning_is_a_copy(gpu):
    pageable = torch.zeros(3)
    pageable.pin_memory().fill_(1)
    assert pageable.tolist() == [0, 0, 0]


def test_an_operation_nobody_thought_of_fails_loudly(gpu):
    with pytest.raises(NotImplementedError, match="emulated GPU"), torch._C.DisableTorchFunctionSubclass():
        torch.sin(on_gpu(3))


# ---- what it computes


OPERATIONS = {
    "linear": lambda x: F.linear(x, x, bias=x[:, 0]),
    "layer_norm": lambda x: F.layer_norm(x, (4,), weight=x[0], bias=x[1]),
    "bmm": lambda x: torch.bmm(x.view(1, 4, 4), x.view(1, 4, 4)),
    "softmax": lambda x: F.softmax(x, dim=1),
    "where": lambda x: torch.where(x > 0.5, x, -1e4),
    "cat": lambda x: torch.cat([x, x], dim=1),
    "cumsum": lambda x: torch.cumsum(x > 0.5, dim=1).int() * (x > 0.5) + 1,
    "embedding": lambda x: F.embedding((x * 4).int(), x),
    "views": lambda x: x.permute(1, 0).reshape(2, 8).unsqueeze(0)[:, 1:],
    "argmax": lambda x: x.argmax(dim=1, keepdim=True),
    "topk": lambda x: x.topk(2, dim=1).indices,
    "split": lambda x: x.split(1, dim=1)[1],
    "bits": lambda x: (x * 16).to(torch.uint8).bitwise_left_shift(4).bitwise_or((x * 16).to(torch.uint8)),
    "min": lambda x: torch.min(x, dim=0, keepdim=True)[0],
    "scalar on the host": lambda x: x * torch.tensor(2.0),
    "index on the host": lambda x: x[torch.tensor([2, 0])],
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_results_are_the_cpus(gpu, operation):
    torch.manual_seed(0)
    host = torch.rand(4, 4)
    computed = operation(host.cuda())
    assert isinstance(computed, EmulatedCudaTensor)
    assert torch.equal(computed.cpu(), operation(host))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.add_(1),
        lambda x: x.mul_(2),
        lambda x: x.div_(3),
        lambda x: x.clamp_(0.2, 0.6),
        lambda x: x.round_(),
        lambda x: x.copy_(x * 2),
        lambda x: F.relu(x, inplace=True),
        lambda x: x.fill_(7),
        lambda x: x.add_(x),
    ],
)
def test_in_place_operations_allocate_nothing(gpu, change):
    tensor = on_gpu(4, 4)
    before = tensor.cpu()
    allocated = gpu.memory.allocated
    assert change(tensor) is tensor
    assert gpu.memory.allocated == allocated
    assert torch.equal(tensor.cpu(), change(before.clone()))


def test_a_view_is_the_same_memory(gpu):
    tensor = on_gpu(4, 4)
    allocated = gpu.memory.allocated
    part = tensor[1:3].permute(1, 0)
    part.fill_(9)
    assert tensor[1:3].cpu().eq(9).all() and not tensor[0].cpu().eq(9).any()
    assert gpu.memory.allocated == allocated


@pytest.mark.parametrize("value", [lambda: 5, lambda: torch.full((2, 4), 5.0), lambda: torch.full((2, 4), 5.0).cuda()])
def test_a_part_can_be_set(gpu, value):
    tensor = torch.zeros(4, 4, device="cuda")
    tensor[1:3] = value()
    assert tensor.cpu().sum(dim=1).tolist() == [0, 20, 20, 0]


def test_a_part_of_the_host_can_be_set_from_the_gpu(gpu):
    host = torch.zeros(4, 4)
    host[1:3] = torch.full((2, 4), 5.0).cuda()
    assert host.sum(dim=1).tolist() == [0, 20, 20, 0]


@pytest.mark.parametrize(
    "mix",
    [
        lambda gpu, host: gpu + host,
        lambda gpu, host: host + gpu,
        lambda gpu, host: torch.cat([gpu, host]),
        lambda gpu, host: F.linear(gpu, host),
        lambda gpu, host: F.linear(host, gpu),
        lambda gpu, host: gpu.add_(host),
        lambda gpu, host: torch.where(gpu > 0, gpu, host),
        lambda gpu, host: F.layer_norm(gpu, (4,), weight=host[0]),
    ],
)
def test_host_and_gpu_do_not_mix(gpu, mix):
    with pytest.raises(RuntimeError, match="expected all tensors on cuda:0, found one on cpu"):
        mix(on_gpu(4, 4), torch.rand(4, 4))


def test_copies_convert(gpu):
    halves = torch.empty(3, dtype=torch.float16, device="cuda")
    halves.copy_(torch.tensor([1.0, 2.0, 1e-9]))
    assert halves.dtype == torch.float16 and halves.cpu().tolist() == [1, 2, 0]


# ---- memory and time


def test_a_view_takes_no_memory(gpu):
    tensor = on_gpu(16, 16)
    before = gpu.memory.allocated
    view = tensor[1:3].permute(1, 0)
    assert gpu.memory.allocated == before and view.shape == (16, 2)


@pytest.mark.parametrize(
    "copy, to_device, to_host",
    [
        (lambda host, gpu: gpu.copy_(host, non_blocking=True), 400, 0),
        (lambda host, gpu: host.copy_(gpu, non_blocking=True), 0, 400),
        (lambda host, gpu: gpu[:50].copy_(host[:50], non_blocking=True), 200, 0),
        (lambda host, gpu: gpu.half().copy_(host, non_blocking=True), 200, 0),  # CUDA converts on the source's side
        (lambda host, gpu: gpu.__setitem__(slice(0, 100), host), 400, 0),
        (lambda host, gpu: host.cuda(), 400, 0),
        (lambda host, gpu: gpu.cpu(), 0, 400),
        (lambda host, gpu: gpu.copy_(gpu * 2), 0, 0),
        (lambda host, gpu: host.copy_(host * 2), 0, 0),
        (lambda host, gpu: gpu.cuda(), 0, 0),
    ],
)
def test_only_bytes_that_cross_pcie_take_its_time(pacer, copy, to_device, to_host):
    host = torch.ones(100)
    there = torch.ones(100, device="cuda")
    pacer.next_pass()
    copy(host, there)
    booked = pacer.passes[-1]
    assert booked["host to device"] == pytest.approx(to_device / EMULATED_T4.h2d_gb_s / 1e9)
    assert booked["device to host"] == pytest.approx(to_host / EMULATED_T4.d2h_gb_s / 1e9)


@pytest.mark.parametrize(
    "product, flop, nbytes",
    [
        (lambda: F.linear(on_gpu(2, 3, 4), on_gpu(5, 4), on_gpu(5)), 2 * 6 * 4 * 5, 4 * (24 + 20 + 30)),
        (lambda: torch.bmm(on_gpu(2, 3, 4), on_gpu(2, 4, 5)), 2 * 2 * 3 * 4 * 5, 4 * (24 + 40 + 30)),
        (lambda: on_gpu(3, 4) + 1, 0, 0),
    ],
)
def test_products_take_the_time_of_their_operations_and_bytes(pacer, product, flop, nbytes):
    product()
    booked = pacer.passes[-1]
    assert booked["GPU compute"] == pytest.approx(flop / EMULATED_T4.gpu_fp16_tflop_s / 1e12)
    assert booked["GPU memory"] == pytest.approx(nbytes / EMULATED_T4.gpu_mem_gb_s / 1e9)


def test_products_of_halves_accumulate_in_fp32(gpu):
    ones = torch.full((1, 4096), 1.0).half().cuda()
    small = torch.full((1, 4096), 0.001).half().cuda()
    exact = 4096 * float(torch.tensor(0.001).half())
    assert F.linear(ones, small).item() == pytest.approx(exact, rel=1e-3)


def test_torch_cuda_is_the_emulated_gpu(monkeypatch):
    names = (
        "Stream",
        "Event",
        "stream",
        "set_device",
        "synchronize",
        "memory_allocated",
        "max_memory_allocated",
        "max_memory_reserved",
    )
    for name in names:
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))  # put back after this test
    gpu = EmulatedGpu(EMULATED_T4)
    emulated_gpu.install(gpu)
    with gpu.on_this_thread(), torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.set_device(0)
        gpu.pacer.begin()
        held = torch.ones(100_000).cuda()  # 12 ms
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
        torch.cuda.synchronize()
        assert time.perf_counter() >= gpu.pacer.pcie_done_s()
        assert torch.cuda.memory_allocated(held.device) == torch.cuda.max_memory_allocated() == 400_384
        assert torch.cuda.max_memory_reserved() == 2**21


# ---- FlexGen's own statistic


def test_the_peak_of_a_run_is_what_one_counts_by_hand(tmp_path):
    """All on the GPU, the prefill's first MLP: the weights, the KV cache, the attention mask, the new keys and values
    on their way to the cache, the MLP's input, its normalised input and its wide output.
    """
    work = Workload(gpu_batch_size=4, num_gpu_batches=1, prompt_len=32, gen_len=4)
    record = done(run_one(mini(workload=work), tmp_path))
    model, batch, h = EMULATED_MODEL, 4, EMULATED_MODEL.hidden_size

    def rounded(nbytes):
        return -(-nbytes // 512) * 512

    weights = sum(rounded(2 * tensor.elements) for layer in model.layers for tensor in layer.tensors)
    cache = 2 * model.num_layers * rounded(2 * (32 + 4 - 1) * batch * h)
    activations = rounded(2 * batch * 32 * h)
    expected = weights + cache + rounded(batch * 32) + 2 * activations + 2 * activations + 4 * activations
    assert record.peak_gpu_mem_gib * 2**30 == expected


def test_the_peak_is_the_same_every_time(tmp_path):
    settings = mini("50 50 100 0 100 0", repeats=3)
    first = done(run_one(settings, tmp_path))
    second = done(run_one(settings, tmp_path, fresh=True))
    alone = done(run_one(mini("50 50 100 0 100 0", repeats=1), tmp_path, fresh=True))
    peaks = {repeat.peak_gpu_mem_gib for record in (first, second, alone) for repeat in record.repeats}
    assert [len(record.repeats) for record in (first, second, alone)] == [3, 3, 1]
    assert peaks == {first.peak_gpu_mem_gib}
