"""Predictions where the page cache, the copy buffers and the disk reader decide, against runs in memory cgroups."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from helpers.machine.profiles import T4_COLAB, MachineProfile, load
from helpers.paths import ROOT
from helpers.predict.page_cache import served
from helpers.predict.time_model import predict
from helpers.settings import OffloadSplit, RunSettings, Workload

H200 = load(str(ROOT / "outputs" / "reference" / "h200" / "machine-profile.json"))


def host(
    ram_gib: float, disk_gb_s: float = H200.disk_gb_s, direct_disk_gb_s: float = H200.direct_disk_gb_s
) -> MachineProfile:
    """An H200 in a memory cgroup. The process took 0.8 GiB there: 11.25 GiB at the peak of a run that read nothing from
    the disk, less 8 GiB of copy buffers and 2.45 GiB of weights (outputs/reference/h200/against_stock.jsonl)."""
    sizes = {"host_ram_gib": ram_gib, "host_overhead_gib": 0.6, "mapped_files_gib": 0.2}
    return H200.model_copy(update=sizes | {"disk_gb_s": disk_gb_s, "direct_disk_gb_s": direct_disk_gb_s})


def run(gen_len: int, percent: str = "0 0 100 0 100 0", model: str = "opt-1.3b", **options) -> RunSettings:
    split = OffloadSplit.parse(percent)
    return RunSettings(model=model, split=split, device="cuda", workload=Workload(gen_len=gen_len), **options)


T4_LIKE = host(11.2, 0.252, 0.252)
# Measured on 30 November 2026 on an H200, prompt 128, batch 4, the page cache dropped before each run: OPT-1.3B in a
# cgroup of 11.2 GiB whose disk gives 252 MB/s (like the T4 host), in one of 11 GiB with its own disk, and OPT-6.7B.
MEASURED = [
    (T4_LIKE, run(6), 0.730),
    (T4_LIKE, run(6, copy_buffer="fit"), 12.0),
    (T4_LIKE, run(16, copy_buffer="fit"), 12.8),
    (T4_LIKE, run(6, disk_reader="direct"), 0.369),
    (T4_LIKE, run(6, disk_reader="direct", compress_weight=True), 1.31),
    (host(11.0), run(16), 2.07),
    (host(11.0), run(16, copy_buffer="fit"), 10.7),
    (host(12.0), run(3), 10.0),
    (host(11.2), run(3, model="opt-6.7b"), 0.341),
    (host(11.2), run(3, model="opt-6.7b", disk_reader="direct"), 0.490),
    (host(11.2), run(3, "0 50 100 0 100 0", model="opt-6.7b", copy_buffer="fit"), 0.705),
    (host(11.2), run(3, "0 50 100 0 100 0", model="opt-6.7b", copy_buffer="fit", disk_reader="direct"), 1.03),
]


@pytest.mark.parametrize("profile, settings, measured_tok_s", MEASURED)
def test_runs_in_small_cgroups_are_predicted(profile, settings, measured_tok_s):
    prediction = predict(settings, profile)
    assert prediction.total_throughput_tok_s == pytest.approx(measured_tok_s, rel=0.25)
    lowest, highest = prediction.total_throughput_tok_s_bounds
    assert lowest <= measured_tok_s <= highest


def test_half_of_what_fits_came_from_the_page_cache():
    """In these cgroups 8.45 of 17.0 GB and 22.4 of 45.4 GB came from the disk."""
    for profile, settings, from_disk in ((T4_LIKE, run(6), 8.45 / 17.0), (host(11.0), run(16), 22.4 / 45.4)):
        terms = predict(settings, profile).terms_s
        cold = predict(settings.model_copy(update={"page_cache": "cold"}), profile).terms_s
        assert terms["disk"] / cold["disk"] == pytest.approx(from_disk, abs=0.1)


def test_fitted_buffers_leave_room_for_the_page_cache():
    stock, fitted = predict(run(16), T4_LIKE), predict(run(16, copy_buffer="fit"), T4_LIKE)
    assert stock.host_mem_gib == 8.0 and fitted.host_mem_gib < 1.0
    assert not stock.page_cache_serves_disk and fitted.page_cache_serves_disk


def test_more_ram_is_never_slower_and_there_is_no_cliff_without_an_interval():
    """Where the prediction jumps, the bounds on the slow side reach what comes after."""
    found = [predict(run(16), T4_COLAB.model_copy(update={"host_ram_gib": 12 + 0.05 * i})) for i in range(80)]
    speeds = [one.total_throughput_tok_s for one in found]
    assert speeds == sorted(speeds)
    for slower, faster in pairwise(found):
        if faster.total_throughput_tok_s > 1.5 * slower.total_throughput_tok_s:
            assert slower.total_throughput_tok_s_bounds[1] > 1.5 * slower.total_throughput_tok_s


gib = st.floats(0, 100)


@given(gib, gib, gib)
def test_shares_are_in_order_and_all_is_served_where_it_fits(read, room, active):
    shares = [share.item() for share in served(*(np.array([x]) for x in (read, room, active)))]
    assert 0 <= shares[0] <= shares[1] <= shares[2] <= 1
    assert (shares[0] == 1) == (read <= room)
    if read > room + active:
        assert shares == [0, 0, 0]
