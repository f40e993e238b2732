"""The set-up cell finds the lab from any folder, installs missing packages and changes none of the others."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest

from helpers import __main__, forecast, homework, lab, notebook, paths, results
from helpers.errors import Refused
from helpers.machine import disks, limits, profiles
from helpers.setup import colab, doctor, packages
from helpers.weights import store

NOTEBOOKS = sorted((paths.ROOT / "notebooks").glob("*.ipynb"))
FIRST_CELL = next(cell.source for cell in nbformat.read(NOTEBOOKS[0], 4).cells if cell.cell_type == "code")
COLAB_PYTHON = paths.ROOT / ".venv-colab" / "bin" / "python"  # with Colab's Jupyter: see the Makefile


# Not the project's .venv, through which the cell would find the real project.
SYSTEM_PYTHON = sys._base_executable  # type: ignore[attr-defined]


def run_cell(folder: Path, times: int = 1, python: str = SYSTEM_PYTHON, **environment: str):
    """Run the set-up cell in a folder, in a Python of its own."""
    code = f"cell = {FIRST_CELL!r}\nfor _ in range({times}): exec(cell)"
    return subprocess.run(
        [python, "-c", code], cwd=folder, env=os.environ | environment, capture_output=True, text=True
    )


def a_project(folder: Path) -> Path:
    """The one file that the set-up cell looks for; it prints where it is."""
    (folder / "helpers" / "setup").mkdir(parents=True)
    (folder / "helpers" / "__init__.py").touch()
    (folder / "helpers" / "setup" / "colab.py").write_text("def set_up(): print('set up', __file__)")
    return folder


# ---------------------------------------------------------------- the cell


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_every_notebook_begins_with_the_same_short_cell(path):
    cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    assert cells[0].source == FIRST_CELL
    assert len(FIRST_CELL.splitlines()) <= 25
    assert (cells[0].metadata["cellView"], cells[0].metadata["jupyter"]["source_hidden"]) == ("form", True)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_every_parameter_is_a_form_field_too(path):
    (cell,) = [cell for cell in nbformat.read(path, 4).cells if "parameters" in cell.metadata.get("tags", [])]
    lines = [line for line in cell.source.splitlines() if line[0] not in " }"]  # a dict's contents
    assert all("# @param" in line for line in lines if "= {" not in line)  # Colab's forms have no dicts


@pytest.mark.parametrize(
    "where, start",
    [
        ("lab", "lab"),
        ("lab", "lab/notebooks"),
        ("lab", "lab/notebooks/deep/er"),
        ("offload-lab", "."),
        ("uploaded-main", "."),
    ],
)
def test_the_project_is_found_here_above_or_beside(tmp_path, where, start):
    project = a_project(tmp_path / where)
    (tmp_path / start).mkdir(parents=True, exist_ok=True)
    ran = run_cell(tmp_path / start)
    assert ran.stdout == f"set up {project / 'helpers' / 'setup' / 'colab.py'}\n", ran.stderr


@pytest.mark.parametrize("how", ["papermill", "papermill, relative", "environment", "editor", "venv"])
def test_the_project_is_found_from_an_unrelated_folder(tmp_path, how):
    project = a_project(tmp_path / "far" / "lab")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    notebook = project / "notebooks" / "01.ipynb"
    if how.startswith("papermill"):  # its own command line names the notebook
        named = os.path.relpath(notebook, elsewhere) if "relative" in how else str(notebook)
        code = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[2]])"
        command = [SYSTEM_PYTHON, "-c", code, named, FIRST_CELL]
        ran = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True)
    elif how == "editor":
        code = f"__vsc_ipynb_file__ = {str(notebook)!r}\n{FIRST_CELL}"
        ran = subprocess.run([SYSTEM_PYTHON, "-c", code], cwd=elsewhere, capture_output=True, text=True)
    elif how == "environment":
        ran = run_cell(elsewhere, OFFLOAD_LAB=str(project))
    else:
        subprocess.run([SYSTEM_PYTHON, "-m", "venv", "--without-pip", str(project / ".venv")], check=True)
        ran = run_cell(elsewhere, python=str(project / ".venv" / "bin" / "python"))
    assert Path(ran.stdout.removeprefix("set up ").strip()).samefile(project / "helpers/setup/colab.py"), ran.stderr
    assert list(elsewhere.iterdir()) == []


STAMPED = FIRST_CELL.replace("YOUR_NAME/", "somebody/", 1)


def clone_from(origin: Path) -> dict[str, str]:
    """Git settings that send the cell's clone to a local repository."""
    return {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.file://{origin}.insteadOf",
        "GIT_CONFIG_VALUE_0": "https://github.com/somebody/offload-lab",
    }


def test_a_published_lab_is_cloned_once_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "FIRST_CELL", STAMPED)
    origin = a_project(tmp_path / "origin" / "some-lab")
    git = ["git", "-C", str(origin), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", str(origin)], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "all"], check=True)
    empty = tmp_path / "content"
    empty.mkdir()
    first = run_cell(empty, times=2, **clone_from(origin))
    again = run_cell(empty, GIT_CONFIG_COUNT="0", GIT_ALLOW_PROTOCOL="none")
    clone = f"set up {empty / 'offload-lab' / 'helpers' / 'setup' / 'colab.py'}\n"
    assert (first.stdout, again.stdout) == (clone * 2, clone), first.stderr + again.stderr


def test_a_failed_clone_stops_the_cell_with_gits_own_words(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "FIRST_CELL", STAMPED)
    ran = run_cell(tmp_path, **clone_from(tmp_path / "nothing"))
    assert ran.returncode != 0
    assert "nothing" in ran.stderr and "fatal" in ran.stderr


def test_an_unpublished_copy_gives_both_ways_out_in_one_sentence(tmp_path):
    ran = run_cell(tmp_path)
    assert ran.returncode != 0 and ran.stderr.count("\n") == 1 and "Traceback" not in ran.stderr
    assert "OFFLOAD_LAB" in ran.stderr and "make badges" in ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_real_cell_checks_the_machine_and_can_run_twice(tmp_path):
    before = packages.installed()
    ran = run_cell(paths.ROOT / "notebooks", times=2, python=sys.executable)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert all(line.startswith(("[OK]", "[warn]")) for line in lines), ran.stdout
    names = [line[7:].split(":")[0] for line in lines]
    once = len(names) // 2
    assert names[:once] == names[once:]
    assert names[:6] == ["GPU", "RAM", "disk", "packages", "iostat", "weights"]
    assert packages.installed() == before


def test_set_up_starts_with_the_standard_library_alone():
    ran = subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            "import helpers.setup.colab as c; print(c.packages.missing(c.paths.ROOT / 'requirements.txt'))",
        ],
        cwd=paths.ROOT,
        capture_output=True,
        text=True,
    )
    assert "papermill" in ran.stdout and "torch" in ran.stdout, ran.stderr


# ---------------------------------------------------------------- installing


def wheel(folder: Path, name: str, version: str, needs: str = "") -> None:
    """An empty package with a name, a version and one requirement."""
    info = f"{name}-{version}.dist-info"
    needed = f"Requires-Dist: {needs}\n" if needs else ""
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """A Python with `frontend` 1.0, and a registry with 2.0 and applications that need one or the other."""
    folder = tmp_path_factory.mktemp("image")
    registry = folder / "wheels"
    registry.mkdir()
    wheel(registry, "frontend", "1.0")
    wheel(registry, "frontend", "2.0")
    wheel(registry, "app", "1.0", "frontend>=1")
    wheel(registry, "app", "2.0", "frontend>=2")
    wheel(registry, "greedy", "1.0", "frontend>=2")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(registry), "PIP_CONFIG_FILE": os.devnull}
    environment["PYTHONPATH"] = str(paths.ROOT)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "-q", "frontend==1.0"], check=True, env=environment)

    def install(requirements: str) -> subprocess.CompletedProcess:
        file = folder / "requirements.txt"
        file.write_text(requirements)
        code = (
            "import sys, pathlib, json; from helpers.setup import packages\n"
            "say = lambda text: print(text, file=sys.stderr)\n"
        )
        code += "print(json.dumps([packages.install_missing(pathlib.Path(sys.argv[1]), say), packages.installed()]))"
        return subprocess.run([str(python), "-c", code, str(file)], env=environment, capture_output=True, text=True)

    return install


def test_installing_changes_no_installed_package(image):
    before = json.loads(image("frontend>=1  # there\n").stdout)[1]
    installed, after = json.loads(image("# why\n\nfrontend>=1   # there\napp>=1  # missing\n").stdout)
    assert installed == ["app 1.0"], "the newest app would have taken frontend to 2.0"
    assert after == before | {"app": "1.0"}
    again, unchanged = json.loads(image("app>=1\n").stdout)
    assert (again, unchanged) == ([], after)


def test_a_conflict_is_refused_with_pips_reason(image):
    before = json.loads(image("frontend\n").stdout)[1]
    ran = image("greedy>=1\n")
    assert ran.returncode != 0
    last = ran.stderr.strip().splitlines()[-1]
    assert "Refused: cannot install greedy>=1" in last and "ERROR" in last
    assert json.loads(image("frontend\n").stdout)[1] == before


def test_jupyter_itself_is_never_installed(tmp_path):
    (tmp_path / "requirements.txt").write_text("jupyter>=1.0\nno-such-package-here>=2\n")
    assert packages.missing(tmp_path / "requirements.txt") == ["no-such-package-here>=2"]


@pytest.mark.parametrize(
    "version, can_be_pinned",
    [
        ("2.11.0+cu128", True),
        ("1.1.10.post3", True),
        ("2.0.0b7", True),
        ("26.2.1", True),
        ("1.2-unknown", False),
        ("", False),
    ],
)
def test_versions_unknown_to_pip_are_no_constraints(version, can_be_pinned):
    assert bool(packages.VERSION.fullmatch(version)) == can_be_pinned


# ---------------------------------------------------------------- iostat, Drive


@pytest.fixture
def apt(tmp_path, monkeypatch):
    """A stand-in for apt-get, in a PATH without iostat: logs its calls and runs a script."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def with_script(script: str) -> Path:
        (folder / "apt-get").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n{script}\n')
        (folder / "apt-get").chmod(0o755)
        return tmp_path / "calls"

    for tool in ("sh", "touch", "chmod", "test"):
        (folder / tool).symlink_to(shutil.which(tool))
    monkeypatch.setenv("PATH", str(folder))
    return with_script


def test_iostat_is_installed_by_apt_after_an_update(apt, tmp_path):
    calls = apt(
        f'if test "$1" = install; then test -e {tmp_path}/lists || exit 100; '
        f"touch {tmp_path}/bin/iostat; chmod +x {tmp_path}/bin/iostat; else touch {tmp_path}/lists; fi"
    )
    packages.install_iostat()
    assert shutil.which("iostat")
    assert [line.split()[0] for line in calls.read_text().splitlines()] == ["install", "update", "install"]
    packages.install_iostat()
    assert len(calls.read_text().splitlines()) == 3


def test_a_failing_apt_is_no_error(apt):
    apt("exit 100")
    packages.install_iostat()
    assert shutil.which("iostat") is None


def test_a_hanging_apt_is_given_up(apt, monkeypatch):
    monkeypatch.setattr(packages, "APT_LIMIT_S", 0.2)
    apt("while :; do :; done")
    packages.install_iostat()


def test_drive_is_refused_outside_colab(tmp_path):
    colab.mount_drive(tmp_path)  # not on Drive: nothing to do
    with pytest.raises(Refused, match="in Colab only"):
        colab.mount_drive(Path("/content/drive/MyDrive/offload-lab"))


# ---------------------------------------------------------------- doctor and what the homework will take


def test_weights_on_drive_give_a_warning(monkeypatch, tmp_path):
    drive = disks.Disk(None, "fuse.drive", "FUSE", is_network=True)
    monkeypatch.setattr(disks, "disk_of", lambda path: drive)
    (found,) = (check for check in doctor.check(tmp_path) if check.name == "disk")
    assert found.status == "warn" and "OFFLOAD_LAB_HOME" in found.text and "fuse.drive" in found.text


def test_a_disk_in_memory_fails_the_check(monkeypatch, tmp_path):
    monkeypatch.setattr(disks, "disk_of", lambda path: disks.Disk(None, "tmpfs", "memory", is_memory=True))
    checks = doctor.check(tmp_path)
    assert not doctor.as_json(checks)["ready"]


def test_a_package_too_old_is_named(monkeypatch, tmp_path):
    (tmp_path / "requirements.txt").write_text("pandas>=99  # why\njupyter>=99\n")
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    (found,) = (check for check in doctor.check(tmp_path) if check.name == "packages")
    assert found.status == "FAIL" and "pandas" in found.text and ">=99" in found.text


def test_kept_weights_are_recognised_without_writing(tmp_path):
    assert store.kept("opt-mini", tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    made = store.prepare("opt-mini", lambda text: None, tmp_path)
    assert made.source.startswith(store.kept("opt-mini", tmp_path))
    some_file = next(file for file in made.path.rglob("*.weight"))
    some_file.write_bytes(some_file.read_bytes()[:-1])
    assert store.kept("opt-mini", tmp_path) is None


def test_doctor_prints_the_checks_and_its_exit_code_follows(tmp_path):
    command = [sys.executable, "-m", "helpers", "doctor"]
    plain = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True)
    as_json = subprocess.run([*command, "--json"], cwd=paths.ROOT, capture_output=True, text=True)
    report = json.loads(as_json.stdout)
    assert [line[7:].split(":")[0] for line in plain.stdout.splitlines()] == [c["name"] for c in report["checks"]]
    assert plain.returncode == as_json.returncode == (0 if report["ready"] else 1)


def test_shared_runs_are_forecast_once(tmp_path):
    forecasts = forecast.of_homework("emulated", tmp_path)
    distinct = {run.key for question in homework.QUESTIONS for run in homework.plan(question, "emulated").values()}
    assert sum(found.runs for found in forecasts.values()) == len(distinct)
    assert all(found.seconds > 0 for found in forecasts.values())


def test_known_runs_cost_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(lab, "without_figures", lambda runs, output: [])
    found = forecast.of(homework.plan("q1", "emulated"), tmp_path)
    assert (found.runs, found.known, found.seconds) == (0, 5, 0)
    assert forecast.of(homework.plan("q1", "emulated"), tmp_path, fresh=True).runs == 5


def a_gpu(name, monkeypatch):
    roomy = limits.MemoryAllowance(*2 * (int(12.67 * 2**30),), "RAM", "RAM")
    monkeypatch.setattr(limits, "memory_allowance", lambda: roomy)
    here = results.Machine(name=name, cpu="a CPU", cpu_count=2, ram_gib=12.7, gpu_mem_gib=14.6, platform="Linux")
    monkeypatch.setattr(lab, "describe_machine", lambda device: here)


def test_the_plan_names_runs_that_will_not_fit(tmp_path, monkeypatch):
    a_gpu("Tesla T4", monkeypatch)
    small = limits.MemoryAllowance(9 * 2**30, 9 * 2**30, "RAM", "RAM")
    monkeypatch.setattr(limits, "memory_allowance", lambda: small)
    runs = homework.plan("q1", "cuda")
    found = forecast.of(runs, tmp_path)
    assert set(found.refused) == {"q1-4"} and found.runs == 4  # half on the CPU, and the copy threads' 8 GiB
    assert "q1-4 will be refused" in str(found) and "9.0 GiB are free" in str(found)


def test_only_a_t4_has_a_forecast_without_a_profile(tmp_path, monkeypatch):
    runs = homework.plan("q1", "cuda")
    a_gpu("Tesla T4", monkeypatch)
    found = forecast.of(runs, tmp_path)
    # The hand-in's five generations alone: 64 tokens each at its token/s.
    assert found.seconds > sum(64 / tokens_per_s for tokens_per_s in (65.771, 28.908, 0.814, 0.705, 0.357))
    assert found.seconds < 20 * 60
    assert "predicted" in found.basis
    assert 2.7 < found.gpu_gib < 2.9 and found.host_gib > 8
    a_gpu("Some GPU", monkeypatch)
    unknown = forecast.of(runs, tmp_path)
    assert unknown.seconds is None and "notebook 00" in str(unknown)


def test_the_plan_mentions_an_outdated_profile(tmp_path, monkeypatch):
    (tmp_path / profiles.PROFILE_NAME).write_text('{"name": "Some GPU"}')
    for name in ("Some GPU", "Tesla T4"):
        a_gpu(name, monkeypatch)
        assert "run notebook 00 again" in str(forecast.of(homework.plan("q1", "cuda"), tmp_path))


def test_optional_runs_are_skipped_where_they_take_long(tmp_path, monkeypatch):
    runs = homework.plan("q4", "cuda")
    a_gpu("Tesla T4", monkeypatch)
    left, dear = forecast.affordable(runs, tmp_path)
    assert set(dear) == set(homework.BESIDE) == set(runs) - set(left)
    assert all(150 < seconds < 300 for seconds in dear.values())
    assert forecast.affordable(homework.plan("q4", "cuda", page_cache="cold"), tmp_path)[1] == {}
    for question in ("q1", "q2", "q3"):
        plan = homework.plan(question, "cuda")
        assert forecast.affordable(plan, tmp_path) == (plan, {})
    minutes = sum(found.seconds for found in forecast.of_homework("cuda", tmp_path).values()) / 60
    assert 15 < minutes < 25
    a_gpu("Some GPU", monkeypatch)  # of unknown speed
    assert forecast.affordable(runs, tmp_path) == (runs, {})
    a_gpu("Tesla T4", monkeypatch)
    monkeypatch.setattr(lab, "without_figures", lambda runs, output: [])
    assert forecast.affordable(runs, tmp_path) == (runs, {})  # known, and costs nothing
    assert set(forecast.affordable(runs, tmp_path, fresh=True)[1]) == set(homework.BESIDE)


def test_a_skipped_run_comes_with_the_command_that_measures_it(tmp_path, monkeypatch):
    a_gpu("Tesla T4", monkeypatch)
    shown = []
    monkeypatch.setattr(notebook, "display", lambda text: shown.append(text.data))
    monkeypatch.setattr(lab, "run", lambda runs, *_, **__: results.Sweep({}))
    output = tmp_path / "my results"
    page = notebook.Page("cuda", output)
    page.run(homework.QUESTIONS["q4"])
    (text,) = (text for text in shown if "Skipped" in text)
    assert "q4-disk-cold" in text and " min" in text
    words = shlex.split(text.split("`")[1])
    assert words[:3] == ["cd", str(paths.ROOT), "&&"]
    measured = []

    def run(runs, *_, **__):
        measured.extend([runs] if not isinstance(runs, dict) else runs.values())
        raise Refused("measured elsewhere")

    monkeypatch.setattr(lab, "run", run)
    monkeypatch.setattr(lab, "choose_device", lambda wanted: wanted)
    __main__.main(words[words.index("measure") :])
    assert measured == [page.settings(homework.QUESTIONS["q4"])["q4-disk-cold"]]


def test_a_measured_machine_is_forecast_from_its_profile(tmp_path, monkeypatch):
    runs = homework.plan("q1", "cuda")
    a_gpu("Some GPU", monkeypatch)
    faster = profiles.T4_COLAB.model_copy(update={"name": "Some GPU", "disk_gb_s": 1.0})
    (tmp_path / profiles.PROFILE_NAME).write_text(faster.model_dump_json())
    found = forecast.of(runs, tmp_path)
    a_gpu("Tesla T4", monkeypatch)
    assert found.seconds < forecast.of(runs, tmp_path).seconds
    (tmp_path / profiles.PROFILE_NAME).write_text("{")
    a_gpu("Some GPU", monkeypatch)
    assert forecast.of(runs, tmp_path).seconds is None


@pytest.mark.parametrize("seconds, words", [(2, "5 s"), (47, "45 s"), (89, "90 s"), (91, "2 min"), (560, "9 min")])
def test_forecasts_are_rounded(seconds, words):
    assert forecast.in_words(seconds) == f"about {words}"


# ---------------------------------------------------------------- Colab's Jupyter


@pytest.mark.timeout(1200)
@pytest.mark.skipif(not COLAB_PYTHON.exists(), reason="no .venv-colab (`make .venv-colab/ready` makes it)")
@pytest.mark.parametrize("names", [["machine"], pytest.param([], marks=pytest.mark.long)], ids=["one", "all"])
def test_notebooks_run_in_colabs_jupyter(names, tmp_path):
    ran = subprocess.run(
        [str(COLAB_PYTHON), "-m", "helpers", "run", *names, "--device", "emulated", "--output", str(tmp_path)],
        cwd=paths.ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert names or (tmp_path / "report.html").exists()
    executed = [nbformat.read(path, 4) for path in sorted((tmp_path / "notebooks").glob("*.ipynb"))]
    assert len(executed) == (len(names) or len(NOTEBOOKS))
    ipykernel = subprocess.run(
        [str(COLAB_PYTHON), "-c", "import importlib.metadata as m; print(m.version('ipykernel'))"],
        capture_output=True,
        text=True,
    )
    assert ipykernel.stdout.strip() == "6.17.1"
