"""The command line: exit codes, one JSON object and nothing else, refused before anything starts."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given

from factories import at_phase, workers
from helpers import flexgen_command, homework, lab, models, paths, results, suite
from helpers.__main__ import DONE, FAILED, REFUSED, main
from helpers.engine import launcher
from helpers.placement import place
from helpers.report.comparison import REFERENCE
from helpers.results import Log
from helpers.settings import RunSettings
from test_settings import all_settings

SHORT = ("--device", "emulated", "--prompt-len", "16", "--gen-len", "4", "--gpu-batch-size", "1", "--repeats", "1")


def measure(*arguments, percent="100 0 100 0 100 0", output):
    return main(["measure", "--percent", *percent.split(), *SHORT, "--output", str(output), *arguments])


@pytest.fixture
def nothing_starts(monkeypatch):
    def started(*arguments, **options):
        raise AssertionError("something was started")

    monkeypatch.setattr(launcher, "run", started)
    monkeypatch.setattr(launcher, "warm_server", started)
    monkeypatch.setattr(suite, "run", started)


# ---- measure


def test_measure_prints_one_json_object_and_nothing_else(tmp_path, capfd):
    assert measure("--json", output=tmp_path) == DONE
    printed = capfd.readouterr().out
    figures = json.loads(printed)
    assert printed.count("\n") == 1
    (record,) = Log(tmp_path / results.LOG_NAME)
    assert (figures["status"], figures["device"]) == ("done", "emulated")
    for name in ("total_throughput_tok_s", "peak_gpu_mem_gib", "bytes_from_disk", "bytes_expected_from_disk"):
        assert figures[name] == getattr(record, name), name
    assert figures["command"] == record.settings.flexgen_command and figures["percent"] == "100 0 100 0 100 0"


def test_measure_for_people_names_each_figure(tmp_path, capfd):
    assert measure(output=tmp_path) == DONE
    printed = capfd.readouterr().out
    assert "total_throughput_tok_s" in printed and "measured on the emulated GPU" in printed
    assert all(len(line) <= 80 or len(line.split()) <= 2 for line in printed.splitlines())
    lines = dict(line.split(maxsplit=1) for line in printed.splitlines() if not line.startswith(" "))
    (record,) = Log(tmp_path / results.LOG_NAME)
    assert float(lines["total_latency_s"]) == pytest.approx(record.total_latency_s, rel=1e-3)
    assert len(lines["total_latency_s"]) < len(str(record.total_latency_s))
    assert lines["achieved"] == "100.0 % GPU" and "reason" not in lines


def test_a_run_that_fails_is_1_with_its_reason_in_the_json(tmp_path, capfd, monkeypatch):
    at_phase(monkeypatch, "measured", lambda: [process.kill() for process in workers()])
    assert measure("--json", percent="0 0 100 0 100 0", output=tmp_path) == FAILED
    figures = json.loads(capfd.readouterr().out)
    assert figures["status"] == "killed" and "SIGKILL" in figures["reason"]
    assert figures["total_throughput_tok_s"] is None and figures["peak_gpu_mem_gib"] is None


def test_a_run_that_this_machine_cannot_make_is_2(tmp_path, capfd, monkeypatch, folder_in_memory):
    monkeypatch.setattr(launcher, "run", None)
    arguments = ("--json", "--offload-dir", folder_in_memory)
    assert measure(*arguments, percent="0 0 100 0 100 0", output=tmp_path) == REFUSED
    assert "memory, not a disk" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())  # nothing written either


def test_every_option_of_flexgen_reaches_the_run(tmp_path, capfd):
    options = [
        "--num-gpu-batches",
        "2",
        "--compress-weight",
        "--overlap",
        "false",
        "--pin-weight",
        "no",
        "--cpu-cache-compute",
        "--page-cache",
        "cold",
    ]
    assert measure(*options, output=tmp_path) == DONE
    (record,) = Log(tmp_path / results.LOG_NAME)
    settings = record.settings
    assert settings.workload.num_gpu_batches == 2 and settings.compress_weight and settings.cpu_cache_compute
    assert not settings.overlap and not settings.pin_weight and settings.page_cache == "cold"


def test_a_reader_that_has_had_enough_is_no_failure():
    asked = [sys.executable, "-m", "helpers", "place", "--percent", "100", "0", "100", "0", "100", "0", "--json"]
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(asked, cwd=paths.ROOT, stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert (done.returncode, done.stderr) == (DONE, "")


def test_a_full_disk_is_1_and_says_where(monkeypatch, capsys, tmp_path):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")  # as a write says it: of no file

    monkeypatch.setattr(lab, "run", full)
    split = ("100", "0", "100", "0", "100", "0")
    assert main(["measure", "--percent", *split, "--device", "emulated", "--output", str(tmp_path)]) == FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("failed: ") and line.endswith(f"No space left on device, writing to {tmp_path}")


def test_what_was_interrupted_is_1_and_says_how_to_go_on(monkeypatch, capsys, tmp_path):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(lab, "run", interrupt)
    assert measure(output=tmp_path) == FAILED
    assert "the same command continues" in capsys.readouterr().err


def test_a_known_result_says_since_when_and_where_and_how_to_measure_again(tmp_path, capfd):
    assert measure("--json", output=tmp_path) == DONE
    first = capfd.readouterr()
    log = str(tmp_path / results.LOG_NAME)
    assert f"recorded in {log}" in first.err and "known since" not in first.err
    assert measure("--json", output=tmp_path) == DONE
    again = capfd.readouterr()
    before, now = json.loads(first.out), json.loads(again.out)
    assert (before["known"], now["known"]) == (False, True)
    assert now == before | {"known": True} and now["results"] == log
    assert f"known since {before['started_at']}" in again.err and log in again.err and "--fresh" in again.err
    assert len(list(Log(log))) == 1


# ---- FlexGen's own command line

COMMAND = (
    "python3 -m flexgen.flex_opt --model facebook/opt-mini --path _DUMMY_ --prompt-len 16 --percent 50 0 100 0 100 0 "
    "--gpu-batch-size 1 --gen-len 4 --offload-dir {} --sep-layer --cut-gen-len 5 --log-file x.log --no-log "
    "--verbose 2 --overlap --pin-weight 0"
)


def test_measure_takes_flexgens_whole_command_line(tmp_path, capfd):
    pasted = COMMAND.format(tmp_path / "disk").split()
    options = ["--device", "emulated", "--repeats", "1", "--output", str(tmp_path / "out"), "--json"]
    assert main(["measure", *options, "--", *pasted]) == DONE
    printed = capfd.readouterr()
    (record,) = Log(tmp_path / "out" / results.LOG_NAME)
    work = record.settings.workload
    assert (str(record.settings.split), work.prompt_len, work.gen_len) == ("50 0 100 0 100 0", 16, 4)
    assert record.settings.overlap and not record.settings.pin_weight
    for flag in ("--path", "--cut-gen-len", "--log-file", "--no-log", "--verbose"):
        assert printed.err.count(f"{flag} has no effect") == 1
    again = ["measure", *options[2:], "--", json.loads(printed.out)["command"]]  # the lab's own comment counts
    assert main(again) == DONE
    assert json.loads(capfd.readouterr().out)["device"] == "emulated"


@given(settings=all_settings())
def test_the_command_that_a_record_prints_is_the_same_run_again(settings):
    pasted = flexgen_command.parse(settings.flexgen_command)
    (values,) = flexgen_command.values(pasted)
    again = RunSettings.of(**({"device": "cuda", "repeats": settings.repeats} | values))
    assert again == settings


def test_what_flexgen_defaults_to_holds_for_its_command_line(tmp_path, capsys, nothing_starts):
    asked = ["measure", "--output", str(tmp_path), "--device", "emulated", "--"]
    assert main([*asked, "python", "-m", "flexgen.flex_opt", "--sep-layer", "false"]) == REFUSED
    assert "--sep-layer false" in capsys.readouterr().err
    (values,) = flexgen_command.values(flexgen_command.parse("python3 -m flexgen.flex_opt > log.txt 2>&1"))
    assert (values["model"], values["prompt_len"], values["gen_len"]) == ("facebook/opt-6.7b", 512, 32)


def test_lists_and_repeated_splits_make_a_sweep(capsys):
    split = ["--percent", "100 0 100 0 100 0", "--percent", *["50", "0", "100", "0", "100", "0"]]
    assert main(["predict", *split, "--gpu-batch-size", "1,4,16", "--machine", "t4-colab", "--json"]) == DONE
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["percent"], run["gpu_batch_size"]) for run in runs] == [
        (percent, batch) for percent in ("100 0 100 0 100 0", "50 0 100 0 100 0") for batch in (1, 4, 16)
    ]


def test_predict_says_which_defaults_it_used_and_measure_has_the_same(capsys):
    split = ["--percent", *["50", "0", "100", "0", "100", "0"], "--json"]
    for device, machine in (("cuda", "t4-colab"), ("emulated", "emulated")):
        assert main(["predict", *split, "--machine", machine]) == DONE
        found = json.loads(capsys.readouterr().out)
        assert found["device"] == device and found["model"] == homework.MODEL[device]
        assert found["prompt_len"] == homework.WORKLOAD[device].prompt_len


def test_without_a_command_the_help_is_printed(capsys):
    assert main([]) == DONE
    assert "usage: python -m helpers" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["run", "measure", "place", "predict", "search", "analyze", "doctor"])
def test_help_has_an_example_and_a_line_for_every_flag(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert "example:" in text and max(map(len, text.splitlines())) <= 80


# ---- refused


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["meassure"], "meassure"),
        (["meassure"], "doctor"),
        (["measure"], "--percent"),
        (["measure", "--percent", "50", "50", "100", "0", "100"], "5 numbers"),
        (["measure", "--percent", "60", "60", "100", "0", "100", "0"], "120"),
        (["measure", "--percent", "-10", "110", "100", "0", "100", "0"], "-10"),
        (["measure", "--percent", "50.5", "49.5", "100", "0", "100", "0"], "50.5"),
        (["measure", "--percent", "100", "0", "100", "0", "100", "0", "--model", "gpt2"], "gpt2"),
        (["measure", "--percent", "100", "0", "100", "0", "100", "0", "--gen-len", "many"], "many"),
        (["measure", "--percent", "100", "0", "100", "0", "100", "0", "--gen-len", "5000"], "5000"),
        (["measure", "--percent", "100", "0", "100", "0", "100", "0", "--overlap", "perhaps"], "perhaps"),
        (["measure", "--percent", "100", "0", "100", "0", "100", "0", "--device", "tpu"], "tpu"),
        (["measure", "--percent", "100", "0", "100", "0", "100", "0", "--page-cache", "hot"], "hot"),
        (["measure", "--percent", "100", "0", "100", "0", "100", "0", "--repeats", "0"], "repeats"),
        (["measure", "--percent", "100", "0", "100", "0", "100", "0", "--speed", "9"], "--speed"),
        (["measure", "--percent", "100", "0", "100", "0", "100", "0", "--output", "/proc/nowhere"], "/proc/nowhere"),
        (["run", "q5"], "q5"),
        (["run", "q9"], "machine, q1, q2, q3, q4, faster, explore"),
        (
            ["predict", "--percent", "100", "0", "100", "0", "100", "0", "--machine", "mine.json"],
            "no such file; notebook",
        ),
        (["run", "--device", "tpu"], "tpu"),
        (["run", "--model", "opt-350m"], "opt-350m"),
        (["run", "--page-cache", "hot"], "hot"),
        (["place", "--percent", "0", "101", "100", "0", "100", "0"], "101"),
        (["place", "--percent", "0", "100", "100", "0", "100", "0", "--model", "opt"], "'opt'"),
        (["analyze", "nothing.csv", "--output", "somewhere"], "nothing.csv"),
        (["analyze"], "PATH"),
        (["analyze", str(REFERENCE)], "--output"),
        (["analyze", str(REFERENCE), "--output", ""], "empty"),
        (["analyze", str(REFERENCE), "--output", str(REFERENCE)], "is a file"),
        (["analyze", "helpers/machine", "--output", "somewhere"], "no file in it holds runs"),
        (["analyze", "/dev/null", "--output", "somewhere"], "a device"),
        (["analyze", "r\udcff.csv", "--output", "somewhere"], "r\\udcff.csv"),
        (["run", "q1", "--dry-run", "--output", str(REFERENCE)], "is a file"),
        (
            [
                "predict",
                "--percent",
                "0",
                "0",
                "100",
                "0",
                "100",
                "0",
                "--machine",
                "t4-colab",
                "--gpu-batch-size",
                "9" * 400,
            ],
            "gpu_batch_size",
        ),
        (["doctor", "now"], "now"),
    ],
)
def test_what_cannot_be_is_2_in_one_line_and_starts_nothing(arguments, named, capsys, nothing_starts, tmp_path):
    if arguments[:1] == ["measure"] and "--output" not in arguments:
        arguments = [*arguments, "--output", str(tmp_path)]
    assert main(arguments) == REFUSED
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("refused: ") and printed.err.count("\n") == 1 and named in printed.err
    assert list(tmp_path.iterdir()) == []


# ---- place, analyze, doctor


def test_place_gives_what_was_asked_and_what_comes_of_it(capsys):
    asked = ["place", "--percent", "20", "80", "100", "0", "100", "0", "--model", "facebook/opt-1.3b"]
    assert main([*asked, "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    shares = {"gpu_percent", "cpu_percent", "disk_percent"}
    assert set(found["asked"]) == shares
    assert set(found["achieved"]) == shares | {"gpu_gib", "cpu_gib", "disk_gib"}
    assert found["asked"]["gpu_percent"] == 20 and found["achieved"]["gpu_percent"] == pytest.approx(7.4, abs=0.05)
    assert main([*asked, "--compress-weight"]) == DONE
    assert "4-bit weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    "model, percent, what",
    [("opt-13b", "100 0 100 0 100 0", "GPU memory"), ("opt-13b", "0 100 100 0 100 0", "host memory")],
)
def test_predict_of_what_does_not_fit_says_first_what_is_short(model, percent, what, capsys):
    asked = ["predict", "--percent", *percent.split(), "--model", model, "--machine", "t4-colab"]
    assert main([*asked, "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    needed = {"GPU memory": found["peak_gpu_mem_gib_range"][1], "host memory": found["host_mem_gib"]}[what]
    assert found["fits"] is False and f"needs {needed:.2f} GiB of {what}, t4-colab has" in found["reason"]
    for name in ("total_throughput_tok_s", "total_latency_s", "peak_gpu_mem_gib", "host_mem_gib"):
        assert isinstance(found[name], float), name
    assert main(asked) == DONE
    assert capsys.readouterr().out.startswith(f"does not fit: {found['reason']}")


def test_predict_for_people_has_the_terms_that_count_in_seconds(capsys):
    asked = ["predict", "--percent", "0", "0", "100", "0", "100", "0", "--machine", "t4-colab"]
    assert main([*asked, "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True and found["reason"] is None
    assert main(asked) == DONE
    printed = capsys.readouterr().out
    for name, seconds in found["terms_s"].items():
        assert (f" {name} {seconds:.4g} s\n" in printed) == (seconds > found["total_latency_s"] / 1000), name
    assert "fit:" not in printed and "reason" not in printed


def test_place_lists_each_placement_between_two_splits_once(capsys):
    asked = ["place", "--percent", *["100", "0", "100", "0", "100", "0"], "--to", *["0", "100", "100", "0", "100", "0"]]
    assert main([*asked, "--json"]) == DONE
    achieved = [tuple(found["achieved"].values()) for found in json.loads(capsys.readouterr().out)]
    model = models.resolve("opt-1.3b")
    every = {place(model, gpu, 100 - gpu, False).layers for gpu in range(101)}
    assert len(set(achieved)) == len(achieved) == len(every)
    assert main(asked) == DONE
    head, *lines = capsys.readouterr().out.splitlines()
    assert f"{len(every)} placements" in head and len({line.split("achieved")[1] for line in lines}) == len(every)
    assert main([*asked[:-1], "50"]) == REFUSED and "activations" in capsys.readouterr().err


def test_search_gives_the_achieved_split_next_to_the_one_asked(capsys):
    asked = ["search", "--model", "opt-1.3b", "--machine", "t4-colab"]
    assert main([*asked, "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    choices = [found["best"], *found["runners_up"]]
    for choice in choices:
        place = ["place", "--percent", *choice["percent"].split(), "--model", "opt-1.3b", "--json"]
        assert main(place + ["--compress-weight"] * choice["compress_weight"]) == DONE
        assert json.loads(capsys.readouterr().out)["achieved"] == choice["achieved"]
    assert main(asked) == DONE
    text = capsys.readouterr().out
    assert text.count("achieved") == len(choices)
    fastest = found["best"]["total_throughput_tok_s"]
    assert f"the first {sum(c['total_throughput_tok_s'] >= 0.9 * fastest for c in choices)} are within 10 %" in text


def test_analyze_writes_tables_figures_and_report_and_says_where_the_report_is(tmp_path, capsys):
    assert main(["analyze", str(REFERENCE), "--output", str(tmp_path)]) == DONE
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    kinds = {(path.parent.name, path.suffix) for path in written}
    assert {("tables", ".csv"), ("tables", ".md"), ("figures", ".png")} <= kinds
    assert (tmp_path / "report.md").is_file() and (tmp_path / "report.html").is_file()
    report, rest = capsys.readouterr().out.splitlines()
    assert report == f"report: {tmp_path / 'report.html'}" and f"{len(written)} files" in rest


def test_analyze_imports_neither_torch_nor_nvml(tmp_path):
    program = (
        "import sys; from helpers.__main__ import main; "
        f"assert main(['analyze', {str(REFERENCE)!r}, '--output', {str(tmp_path)!r}]) == 0; "
        "print(sorted({'torch', 'pynvml', 'flexgen', 'transformers'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=paths.ROOT, capture_output=True, text=True)
    assert ran.stdout.splitlines()[-1:] == ["[]"], ran.stderr


def test_a_template_is_printed_and_nothing_else(capsys):
    assert main(["analyze", "--template"]) == DONE
    assert "total_throughput_tok_s" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, content, named",
    [
        ("noise.csv", bytes(range(256)), "UTF-8"),
        ("noise.jsonl", bytes(range(256)) * 3, "no readable record"),
        ("nothing.csv", b"", "empty"),
        ("nothing.jsonl", b"", "no readable record"),
        ("others.csv", b"a,b\n1,2\n", "percent"),
        ("others.jsonl", b"{}\n[1]\n", "no readable record"),
    ],
)
def test_a_file_of_something_else_is_refused_a_line_each(name, content, named, tmp_path, capsys):
    """Python would show a warning with the line of code that gave it."""
    (tmp_path / name).write_bytes(content)
    assert main(["analyze", str(tmp_path / name), "--output", str(tmp_path / "out")]) == REFUSED
    *before, last = capsys.readouterr().err.splitlines()
    assert last.startswith("refused: ") and name in last and named in last
    assert all(line.startswith("warning: ") and name in line and len(line) < 300 for line in before)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["measure", "--help"], ["doctor", "--help"]])
def test_help_is_help(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == DONE and "usage: python -m helpers" in capsys.readouterr().out


# ---- run


def test_a_dry_run_lists_every_run_and_starts_nothing(tmp_path, capsys, nothing_starts):
    assert main(["run", "--device", "emulated", "--dry-run", "--output", str(tmp_path / "out")]) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert all("opt-mini" in line and "would run" in line for line in lines)
    everything = {name for question in homework.QUESTIONS for name in homework.plan(question, "emulated")}
    assert sorted(line.split()[0] for line in lines) == sorted(everything)
    assert [line.split()[0] for line in lines][:5] == ["q1-1", "q1-2", "q1-3", "q1-4", "q1-5"]
    assert main(["run", "q2", "--device", "emulated", "--dry-run"]) == DONE
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert not (tmp_path / "out").exists()


def test_a_dry_run_says_which_runs_are_known(tmp_path, capsys):
    known = homework.plan("q1", "emulated", "", "natural", 1)["q1-1"]
    lab.run(known, tmp_path, say=lambda text: None)
    asked = ["run", "q1", "--device", "emulated", "--repeats", "1", "--dry-run", "--output", str(tmp_path)]
    capsys.readouterr()
    assert main(asked) == DONE
    printed = capsys.readouterr()
    assert [line.split()[:2] for line in printed.out.splitlines()] == [
        ["q1-1", "known"],
        *(["q1-" + number, "would"] for number in "2345"),
    ]
    assert printed.err.startswith("4 of 5 runs would start")
    assert main([*asked, "--fresh"]) == DONE
    assert "known" not in capsys.readouterr().out


@pytest.fixture
def notebooks_that(monkeypatch, tmp_path):
    """What `run` does once its notebooks have run, in place of them: each with an error or none."""

    def run(errors):
        def stand_in(names, parameters, output, fresh, say):
            return [suite.NotebookRun(name, tmp_path / f"{name}.ipynb", 1.0, errors.get(name, "")) for name in names]

        monkeypatch.setattr(suite, "run", stand_in)
        return main(["run", "q2", "--device", "emulated", "--output", str(tmp_path)])

    return run


def test_a_notebook_that_failed_is_1(notebooks_that, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lab, "without_figures", lambda plan, output: [])
    monkeypatch.setattr(suite, "write_report", lambda output: [output / "report.html"])
    assert notebooks_that({}) == DONE
    assert notebooks_that({"q2": "cell 4: ValueError: why"}) == FAILED


def test_each_notebook_is_said_as_it_starts_and_as_it_ends(monkeypatch, tmp_path, capsys):
    def execute(given, executed, **options):
        print("running", Path(given).name, file=sys.stderr)
        if "00" in given:
            raise ValueError("why")

    monkeypatch.setattr(suite.papermill, "execute_notebook", execute)
    assert main(["run", "machine", "explore", "--device", "emulated", "--output", str(tmp_path)]) == FAILED
    said = capsys.readouterr().err
    steps = ["00_machine", "running 00", "FAIL 00", "05_explore_splits", "running 05", "ok", "05_explore_splits"]
    places = [said.find(step) for step in steps[:-1]]
    assert places == sorted(places) and -1 not in places and "ValueError: why" in said


def test_a_run_without_figures_is_1_though_its_notebook_went_through(notebooks_that, tmp_path, capsys):
    assert notebooks_that({}) == FAILED  # nothing is in the log
    said = capsys.readouterr().err
    assert "no figures for q2-b1, q1-5, q2-b16" in said and "no report" in said


# ---- from elsewhere


def test_from_another_folder_paths_are_the_callers_and_the_default_is_the_projects(tmp_path):
    command = [
        sys.executable,
        "-m",
        "helpers",
        "measure",
        "--percent",
        "100",
        "0",
        "100",
        "0",
        "100",
        "0",
        *SHORT,
        "--json",
        "--output",
        "mine",
    ]
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(paths.ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == DONE, ran.stderr
    assert json.loads(ran.stdout)["status"] == "done"
    assert len(list(Log(tmp_path / "mine" / results.LOG_NAME))) == 1
