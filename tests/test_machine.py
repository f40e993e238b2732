"""What this machine is: the disk behind a path, the memory one may use, GPUs, ceilings."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hypothesis import given, strategies as st

from helpers import paths
from helpers.machine import ceilings, disks, gpus, limits, mounts, this_machine
from helpers.results import Machine

GIB = 2**30

# Rows as kernels 4.18 to 6.x write them: 11, 15 or 17 counters.
DISKSTATS = """\
   7       0 loop0 51 0 2098 30 0 0 0 0 0 40 30 0 0 0 0 0 0
   8       0 sda 250117 91004 33420198 99120 48211 61033 9120448 51230 0 80412 150350 0 0 0 0
   8       1 sda1 249001 91004 33401130 98990 48211 61033 9120448 51230 0 80300 150220
   8       2 sda2 812 0 12960 81 0 0 0 0 0 90 81
 253       0 dm-0 330012 0 33380122 120010 99120 0 9120400 80120 0 80500 200130 0 0 0 0
 252       0 zram0 12 0 96 0 1 0 8 0 0 1 0
"""
DOCKER_OVERLAY = """\
1520 1351 0:132 / / rw,relatime master:612 - overlay overlay rw,lowerdir=/var/lib/docker/overlay2/l/A,upperdir=/b
1521 1520 0:135 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
1522 1520 0:136 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
1523 1522 0:140 / /dev/shm rw,nosuid,nodev,noexec,relatime - tmpfs shm rw,size=65536k
1531 1520 8:1 /var/lib/docker/containers/c0/resolv.conf /etc/resolv.conf rw,relatime - ext4 /dev/sda1 rw
1532 1520 8:1 /var/lib/docker/containers/c0/hostname /etc/hostname rw,relatime - ext4 /dev/sda1 rw
1533 1520 8:1 /var/lib/docker/containers/c0/hosts /etc/hosts rw,relatime - ext4 /dev/sda1 rw
1534 1520 0:150 / /content/drive rw,nosuid,nodev,relatime - fuse.drive drive rw,user_id=0,group_id=0
"""


def found(path: str, number: tuple[int, int], mountinfo: str, tmp_path: Path, diskstats: str = DISKSTATS) -> disks.Disk:
    return disks.find_disk(
        Path(path), number, mounts.parse_mountinfo(mountinfo), disks.parse_diskstats(diskstats), tmp_path
    )


# ---------------------------------------------------------------- the disk behind a path


def test_a_partition_is_its_own_row_and_not_its_disk(tmp_path):
    disk = found("/home/a", (8, 1), "25 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n", tmp_path)
    assert (disk.device, disk.filesystem) == ("sda1", "ext4")
    assert not disk.is_memory and not disk.is_network


def test_a_logical_volume_is_its_device_mapper_row(tmp_path):
    disk = found("/home/a", (253, 0), "25 1 253:0 / / rw - xfs /dev/mapper/vg-root rw\n", tmp_path)
    assert disk.device == "dm-0"


def test_a_btrfs_subvolume_without_a_device_number_is_found_by_its_mount(tmp_path):
    # stat gives an anonymous 0:37, mountinfo another 0:33; only the source names the partition.
    btrfs_over(tmp_path, "sda2")
    disk = found("/home/a", (0, 37), BTRFS, tmp_path)
    assert (disk.device, disk.filesystem) == ("sda2", "btrfs")


def test_an_overlay_in_docker_is_the_device_of_its_bind_mounts(tmp_path):
    disk = found("/content/offload", (0, 132), DOCKER_OVERLAY, tmp_path)
    assert (disk.device, disk.filesystem) == ("sda1", "overlay")
    assert "/etc/resolv.conf" in disk.found_by


@pytest.mark.parametrize("filesystem", ["fuse.drive", "drive", "fuse", "fuse.sshfs", "nfs4", "cifs", "9p", "virtiofs"])
def test_what_comes_over_a_network_has_no_disk(filesystem, tmp_path):
    mountinfo = DOCKER_OVERLAY + f"1600 1520 0:160 / /mnt/far rw - {filesystem} there rw\n"
    disk = found("/mnt/far/offload", (0, 160), mountinfo, tmp_path)
    assert disk.is_network and disk.device is None and filesystem in disk.found_by


def test_google_drive_on_colab_is_network_though_colab_itself_is_not(tmp_path):
    assert found("/content/drive/MyDrive", (0, 150), DOCKER_OVERLAY, tmp_path).is_network
    assert not found("/content/drives", (0, 132), DOCKER_OVERLAY, tmp_path).is_network


def test_memory_is_no_disk(tmp_path):
    disk = found("/dev/shm/offload", (0, 140), DOCKER_OVERLAY, tmp_path)
    assert disk.is_memory and disk.device is None
    on_zram = found("/fast", (252, 0), "25 1 252:0 / /fast rw - ext4 /dev/zram0 rw\n", tmp_path)
    assert on_zram.is_memory


def test_fuse_overlayfs_of_rootless_containers_is_an_overlay(tmp_path):
    mountinfo = DOCKER_OVERLAY.replace("overlay overlay", "fuse.fuse-overlayfs fuse-overlayfs")
    assert found("/work", (0, 132), mountinfo, tmp_path).device == "sda1"


def test_the_only_disk_is_taken_and_said_so(tmp_path):
    disk = found("/pool/a", (0, 50), "25 1 0:50 / / rw - zfs rpool/ROOT rw\n", tmp_path)
    assert disk.device == "sda"  # not its partitions, nor dm-0, zram0 or loop0, which lie on it or on nothing
    assert "only disk" in disk.found_by


def test_of_two_disks_none_is_guessed(tmp_path):
    second = " 259       0 nvme0n1 10 0 80 1 0 0 0 0 0 1 1\n 259       1 nvme0n1p1 10 0 80 1 0 0 0 0 0 1 1\n"
    disk = found("/pool/a", (0, 50), "25 1 0:50 / / rw - zfs rpool/ROOT rw\n", tmp_path, DISKSTATS + second)
    assert disk.device is None
    assert "2 disks (sda, nvme0n1)" in disk.found_by


def test_a_sandbox_without_diskstats_has_an_unknown_disk(tmp_path):
    disk = found("/work", (0, 10), "1 0 0:10 / / rw - overlay none rw\n", tmp_path, diskstats="")
    assert disk.device is None and "unknown" in disk.found_by
    assert found("/work", (0, 10), "", tmp_path, diskstats="").device is None


def test_sysfs_names_a_device_where_diskstats_is_missing(tmp_path):
    block = tmp_path / "dev" / "block"
    block.mkdir(parents=True)
    (block / "259:3").symlink_to("../../devices/pci0000:00/0000:00:04.0/nvme/nvme0/nvme0n1/nvme0n1p3")
    disk = found("/work", (259, 3), "1 0 259:3 / / rw - ext4 /dev/root rw\n", tmp_path, diskstats="")
    assert disk.device == "nvme0n1p3"


def test_of_stacked_mounts_the_last_one_counts(tmp_path):
    mountinfo = (
        "25 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 25 8:2 / /a\\040b rw - ext4 /dev/sda2 rw\n"
        "31 30 0:60 / /a\\040b rw - tmpfs none rw\n"
    )
    assert found("/a b/c", (0, 60), mountinfo, tmp_path).is_memory
    assert found("/a bc", (8, 1), mountinfo, tmp_path).filesystem == "ext4"


def test_a_path_that_does_not_exist_yet_is_judged_by_its_nearest_folder(tmp_path):
    assert disks.disk_of(tmp_path / "not" / "yet").device == disks.disk_of(tmp_path).device
    assert disks.free_bytes(tmp_path / "not" / "yet") == pytest.approx(disks.free_bytes(tmp_path), abs=GIB)


def test_this_machines_disk_is_the_one_that_findmnt_names(tmp_path):
    try:
        source = subprocess.run(
            ["findmnt", "-no", "SOURCE", "-T", str(tmp_path)], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no findmnt here")
    if not Path(source).is_block_device():
        pytest.skip(f"{source} is not a block device")
    assert disks.disk_of(tmp_path).device == os.path.basename(os.path.realpath(source))


counter = st.integers(0, 2**63)


@given(st.lists(counter, min_size=17, max_size=17), st.sampled_from([11, 15, 17]))
def test_diskstats_columns_are_the_kernels(counters, length):
    text = "garbage\n 8 0 short 1 2 3 4\n" + " ".join(["259", "3", "nvme0n1p3", *map(str, counters[:length])]) + "\n"
    (row,) = disks.parse_diskstats(text)
    assert (row.number, row.name) == ((259, 3), "nvme0n1p3")
    assert (row.reads, row.read_bytes, row.busy_ms) == (counters[0], 512 * counters[2], counters[9])
    assert row.counts == any(counters[:length])


@given(st.text(max_size=200))
def test_no_text_breaks_the_parsers(text):
    mounts.parse_mountinfo(text)
    disks.parse_diskstats(text)


BTRFS = "30 1 0:33 /@home /home rw,relatime - btrfs /dev/sda2 rw,subvol=/@home\n"


def btrfs_over(tmp_path, *devices):
    for device in devices:
        (tmp_path / "fs" / "btrfs" / "7c5b" / "devices" / device).mkdir(parents=True)


def test_a_file_system_over_several_disks_is_unknown(tmp_path):
    """btrfs and bcachefs, by a stand-in for sysfs and mountinfo."""
    btrfs_over(tmp_path, "sda2", "nvme0n1")
    disk = found("/home/a", (0, 37), BTRFS, tmp_path)
    assert disk.device is None and "nvme0n1, sda2" in disk.found_by
    bcachefs = "30 1 0:33 / /data rw,relatime - bcachefs /dev/sda2:/dev/sdb rw\n"
    disk = found("/data/a", (0, 37), bcachefs, tmp_path)
    assert disk.device is None and "sda2, sdb" in disk.found_by
    assert found("/data/a", (0, 37), bcachefs.replace(":/dev/sdb", ""), tmp_path).device == "sda2"


def test_btrfs_whose_disks_are_not_shown_is_unknown(tmp_path):
    assert found("/home/a", (0, 37), BTRFS, tmp_path).device is None


@pytest.mark.parametrize("filesystem", ["orangefs", "ocfs2", "somefs", "fuseblk"])
def test_an_unlisted_file_system_without_a_device_is_unknown(filesystem, tmp_path):
    disk = found("/mnt/far", (0, 50), f"25 1 0:50 / / rw - {filesystem} server:/share rw\n", tmp_path)
    assert disk.device is None and "unknown" in disk.found_by


NVME = " 259       1 nvme0n1 0 0 0 0 0 0 0 0 0 0 0\n 259       2 nvme0n1p1 0 0 0 0 0 0 0 0 0 0 0\n"


def nvme_path(number):
    return f" 259       {number} nvme0c{number}n1 10 0 80 1 0 0 0 0 0 1 1\n"


@pytest.mark.parametrize("node, number", [("nvme0n1", 1), ("nvme0n1p1", 2)])
def test_a_multipath_nvme_disk_is_counted_on_its_path(node, number, tmp_path):
    """By a stand-in for /proc/diskstats, as a kernel with native multipath fills it."""
    mountinfo = f"25 1 259:{number} / / rw - ext4 /dev/{node} rw\n"
    disk = found("/a", (259, number), mountinfo, tmp_path, NVME + nvme_path(0))
    assert disk.device == "nvme0c0n1" and "own counters are zero" in disk.found_by
    two = found("/a", (259, number), mountinfo, tmp_path, NVME + nvme_path(0) + nvme_path(3))
    assert two.device is None and "nvme0c0n1, nvme0c3n1" in two.found_by


# ---------------------------------------------------------------- memory and CPUs


def fake_proc(tmp_path: Path, cgroup: str, mountinfo: str, total_gib: int = 64, available_gib: int = 48) -> Path:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(cgroup)
    (proc / "self/mountinfo").write_text(mountinfo)
    (proc / "meminfo").write_text(
        f"MemTotal:       {total_gib * 2**20} kB\nMemFree:  1 kB\nMemAvailable:   {available_gib * 2**20} kB\n"
    )
    return proc


def cgroup_folder(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_without_a_cgroup_limit_the_machine_is_the_limit(tmp_path):
    proc = fake_proc(tmp_path, "0::/user.slice\n", f"30 1 0:26 / {tmp_path}/cg rw - cgroup2 cgroup2 rw\n")
    cgroup_folder(tmp_path / "cg/user.slice", memory__max="max", memory__current=5 * GIB)
    allowance = limits.memory_allowance(proc)
    assert (allowance.total_bytes, allowance.free_bytes) == (64 * GIB, 48 * GIB)
    assert allowance.total_limited_by == allowance.free_limited_by == "RAM of this machine"


def test_page_cache_counts_as_free_inside_a_cgroup(tmp_path):
    proc = fake_proc(tmp_path, "0::/run\n", f"30 1 0:26 / {tmp_path}/cg rw - cgroup2 cgroup2 rw\n")
    cgroup_folder(
        tmp_path / "cg/run",
        memory__max=13 * GIB,
        memory__current=12 * GIB,
        memory__stat=f"anon {3 * GIB}\nfile {9 * GIB}\ninactive_file {8 * GIB}\nactive_file {GIB}",
    )
    allowance = limits.memory_allowance(proc)
    assert (allowance.total_bytes, allowance.free_bytes) == (13 * GIB, 9 * GIB)
    assert str(tmp_path / "cg/run/memory.max") in allowance.total_limited_by


def test_memory_high_is_a_limit_too(tmp_path):
    proc = fake_proc(tmp_path, "0::/run\n", f"30 1 0:26 / {tmp_path}/cg rw - cgroup2 cgroup2 rw\n")
    cgroup_folder(tmp_path / "cg/run", memory__max="max", memory__high=10 * GIB, memory__current=4 * GIB)
    allowance = limits.memory_allowance(proc)
    assert (allowance.total_bytes, allowance.free_bytes) == (10 * GIB, 6 * GIB)
    assert "memory.high" in allowance.total_limited_by


def test_ulimit_v_is_a_limit_too():
    code = "from helpers.machine import limits as l; print(l.memory_allowance())"
    ended = subprocess.run(
        ["bash", "-c", f"ulimit -v 4000000; exec {sys.executable} -c '{code}'"],
        capture_output=True,
        text=True,
        check=True,
        cwd=paths.ROOT,
    )
    assert "total_bytes=4096000000" in ended.stdout and "ulimit -v" in ended.stdout


@given(st.lists(st.one_of(st.none(), st.integers(1, 100)), min_size=1, max_size=5))
def test_the_tightest_cgroup_on_the_path_binds(limits_gib):
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        tmp_path = Path(name)
        path = "/".join(f"level{i}" for i in range(len(limits_gib)))
        proc = fake_proc(tmp_path, f"0::/{path}\n", f"30 1 0:26 / {tmp_path}/cg rw - cgroup2 cgroup2 rw\n")
        folder = tmp_path / "cg"
        for i, limit in enumerate(limits_gib):
            folder /= f"level{i}"
            cgroup_folder(folder, memory__max="max" if limit is None else limit * GIB, memory__current=GIB)
        allowance = limits.memory_allowance(proc)
    stated = [limit for limit in limits_gib if limit is not None]
    assert allowance.total_bytes == min([64, *stated]) * GIB
    assert allowance.free_bytes == min([48, *(limit - 1 for limit in stated)]) * GIB


@pytest.mark.parametrize("root", ["/", "/docker/c0"], ids=["the host's view", "mounted as the container's own"])
def test_cgroup_v1(tmp_path, root):
    proc = fake_proc(
        tmp_path,
        "9:name=systemd:/\n4:memory:/docker/c0\n3:cpu,cpuacct:/docker/c0\n0::/\n",
        f"30 1 0:26 {root} {tmp_path}/memory rw - cgroup cgroup rw,memory\n"
        f"31 1 0:27 {root} {tmp_path}/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        f"32 1 0:28 / {tmp_path}/unified rw - cgroup2 cgroup2 rw\n",
    )
    inside = "docker/c0" if root == "/" else ""
    cgroup_folder(tmp_path / "unified")
    cgroup_folder(
        tmp_path / "memory" / inside,
        memory__limit_in_bytes=8 * GIB,
        memory__usage_in_bytes=6 * GIB,
        memory__stat=f"cache {2 * GIB}\ninactive_file 0\ntotal_inactive_file {GIB}",
    )
    cgroup_folder(tmp_path / "cpu" / inside, cpu__cfs_quota_us=50_000, cpu__cfs_period_us=100_000)
    if inside:
        cgroup_folder(tmp_path / "memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=20 * GIB)
        cgroup_folder(tmp_path / "cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100_000)
    allowance = limits.memory_allowance(proc)
    assert (allowance.total_bytes, allowance.free_bytes) == (8 * GIB, 3 * GIB)
    assert "cgroup v1" in allowance.total_limited_by
    assert limits.cpu_count(proc) == 1


def test_a_cgroup_outside_ones_view_is_the_mounts_root(tmp_path):
    proc = fake_proc(tmp_path, "0::/../../other\n", f"30 1 0:26 /../.. {tmp_path}/cg rw - cgroup2 cgroup2 rw\n")
    cgroup_folder(tmp_path / "cg", memory__max=2 * GIB, memory__current=GIB, cpu__max="max 100000")
    assert limits.memory_allowance(proc).total_bytes == 2 * GIB
    assert limits.cpu_count(proc) == len(os.sched_getaffinity(0))


def test_this_machines_memory_is_what_psutil_says_unless_a_cgroup_says_less():
    allowance = limits.memory_allowance()
    assert 0 < allowance.free_bytes <= allowance.total_bytes <= psutil.virtual_memory().total


def test_affinity_is_respected():
    code = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); "
        "from helpers.machine import limits; print(limits.cpu_count())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=paths.ROOT)
    assert said.stdout.strip() == "1"


# ---------------------------------------------------------------- GPU

UUIDS = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-8a11-0001", "GPU-8a11-0002")


@pytest.mark.parametrize(
    ("setting", "visible"),
    [
        (None, (0, 1, 2)),
        ("", ()),
        ("-1", ()),
        ("1", (1,)),
        ("2,0", (2, 0)),
        ("1,-1,0", (1,)),
        ("0,7,1", (0,)),
        ("GPU-8932f937", (0,)),
        ("GPU-8a11-0002, 0", (2, 0)),
        ("GPU-8a11", ()),
        ("void", ()),
    ],
)
def test_cuda_visible_devices(setting, visible):
    assert gpus.visible_uuids(UUIDS, setting) == tuple(UUIDS[i] for i in visible)


def test_a_slice_of_a_gpu_is_named_by_its_own_uuid():
    assert gpus.visible_uuids(UUIDS, "MIG-c7384736-a75d") == ("MIG-c7384736-a75d",)


def test_hidden_gpus_are_not_available(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert gpus.visible() == () and not gpus.cuda_available()


def test_the_machine_is_described_without_torch():
    code = (
        "import sys; from helpers.machine import gpus, this_machine; "
        "this_machine.describe('cuda', None); gpus.visible(); print('torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=paths.ROOT)
    assert said.stdout.strip() == "False"


def test_describe():
    emulated = this_machine.describe("emulated", "t4-colab")
    assert isinstance(emulated, Machine)
    assert (emulated.name, emulated.profile, emulated.gpu_mem_gib) == ("emulated t4-colab", "t4-colab", 14.56)
    assert emulated.cpu and emulated.cpu_count >= 1 and emulated.ram_gib > 0
    real = this_machine.describe("cuda", None)
    if gpus.cuda_available():
        assert real.name == gpus.visible()[0].name and real.gpu_mem_gib > 0
    else:
        assert real.gpu_mem_gib is None and "NVML" in real.name


# ---------------------------------------------------------------- ceilings


@pytest.fixture
def small_test_file(monkeypatch):
    monkeypatch.setattr(ceilings, "TEST_FILE_BYTES", 4 * ceilings.BLOCK_BYTES)


def test_ceilings_are_measured_kept_as_json_and_leave_nothing(tmp_path, small_test_file):
    folder = tmp_path / "not there yet"
    measured = ceilings.measure_ceilings("emulated", folder)
    assert measured.page_cache_read_gb_s > 0
    assert (measured.disk_read_gb_s is None) == any(n.startswith("disk_read_gb_s: not") for n in measured.notes)
    assert measured.gpu_copy_gb_s is measured.matmul_tflop_s is None
    assert ceilings.MachineCeilings.model_validate_json(measured.model_dump_json()) == measured
    assert list(folder.iterdir()) == []


def test_the_disks_ceiling_comes_from_the_disk(tmp_path, small_test_file):
    before = ceilings._bytes_from_storage()
    rate = ceilings.read_rates(tmp_path)["disk_read_gb_s"]
    if rate.gb_s is None or before is None:
        pytest.skip(rate.how)
    assert ceilings._bytes_from_storage() - before >= ceilings.TEST_FILE_BYTES


def test_without_o_direct_the_page_cache_is_dropped(tmp_path, small_test_file, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECT")
    before = ceilings._bytes_from_storage()
    rate = ceilings.read_rates(tmp_path)["disk_read_gb_s"]
    if rate.gb_s is None:
        pytest.skip(rate.how)
    assert "O_DIRECT refused" in rate.how and "page cache dropped" in rate.how
    assert ceilings._bytes_from_storage() - before >= ceilings.TEST_FILE_BYTES


def test_memory_is_not_measured_as_a_disk():
    shm = Path("/dev/shm")
    if not disks.disk_of(shm).is_memory:
        pytest.skip("no tmpfs here")
    rates = ceilings.read_rates(shm)
    assert rates["disk_read_gb_s"].gb_s is None and "tmpfs" in rates["disk_read_gb_s"].how
    assert rates["page_cache_read_gb_s"].gb_s > 0


def test_a_folder_that_cannot_be_written_is_a_note(tmp_path):
    (tmp_path / "a file").write_text("")
    measured = ceilings.measure_ceilings("emulated", tmp_path / "a file" / "below")
    assert measured.disk_read_gb_s is None and measured.page_cache_read_gb_s is None
    assert any("a file" in note for note in measured.notes)


@pytest.mark.skipif(not gpus.cuda_available(), reason="no GPU here")
def test_the_gpus_ceilings(tmp_path, small_test_file):
    measured = ceilings.measure_ceilings("cuda", tmp_path)
    assert measured.gpu_copy_gb_s > measured.host_to_device_gb_s > 0
    assert measured.device_to_host_gb_s > 0 and measured.matmul_tflop_s > 0
