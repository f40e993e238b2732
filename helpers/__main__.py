"""LLM offloading lab: run FlexGen, predict it, and turn figures into a report.

Exit codes: 0 done, 1 something failed (whatever finished is kept), 2 refused
before anything started.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from helpers import flexgen_command, homework, options, paths
from helpers.errors import Refused, say_warning
from helpers.flexgen_command import OneLineParser
from helpers.homework import QUESTIONS
from helpers.settings import OffloadSplit, RunSettings

DONE, FAILED, REFUSED = 0, 1, 2
WITH_RUNS = (*QUESTIONS, "faster")  # notebooks that run settings of `homework`
NOTEBOOKS = ("machine", *WITH_RUNS, "explore")
SPLIT = "--percent 50 0 100 0 100 0"
EXAMPLES = {
    "run": "python -m helpers run q1 q2 --dry-run",
    "measure": f"python -m helpers measure {SPLIT} --gpu-batch-size 1,4,16\n"
    "  python -m helpers measure -- python3 -m flexgen.flex_opt --percent ...",
    "place": "python -m helpers place --percent 20 80 100 0 100 0",
    "predict": f"python -m helpers predict {SPLIT} --machine t4-colab",
    "search": "python -m helpers search --model opt-6.7b --machine t4-colab",
    "analyze": "python -m helpers analyze fo-1.3b-*.log iostat.txt --output report\n"
    "  python -m helpers analyze --template > figures.csv",
    "doctor": "python -m helpers doctor",
}


def main(arguments: Sequence[str] | None = None) -> int:
    given: argparse.Namespace = argparse.Namespace()
    try:
        typed = list(sys.argv[1:] if arguments is None else arguments)
        _check_text(typed)
        parser = _parser()
        if not typed:
            parser.print_help()
            return DONE
        pasted = typed[typed.index("--") + 1 :] if "--" in typed else []
        given = parser.parse_args(typed[: typed.index("--")] if "--" in typed else typed)
        if "--" in typed and given.name != "measure":
            raise Refused(f"-- {' '.join(pasted)}: only measure takes FlexGen's command line")
        given.pasted = pasted
        with warnings.catch_warnings():
            warnings.showwarning = say_warning
            code = given.command(given)
            sys.stdout.flush()
            return code
    except Refused as error:
        print(f"refused: {error}", file=sys.stderr)
        return REFUSED
    except OSError as error:  # a full disk, a vanished file: work had already started
        if isinstance(error, BrokenPipeError) and _reader_closed_the_pipe():
            return DONE
        where = f", writing to {given.output}" if error.filename is None and "output" in given else ""
        print(f"failed: {error}{where}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted; finished results are kept, and the same command continues from there", file=sys.stderr)
        return FAILED


def _reader_closed_the_pipe() -> bool:
    """Return True if stdout's reader has closed the pipe (`| head`); the rest of the output is then dropped."""
    stdout = select.poll()
    stdout.register(sys.stdout, 0)
    closed = any(event & select.POLLERR for _, event in stdout.poll(0))
    if closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return closed


def _check_text(arguments: Sequence[str]) -> None:
    """Raises Refused for a name that isn't UTF-8: neither a table nor a report could hold it."""
    for argument in arguments:
        try:
            os.fsencode(argument).decode("utf-8")  # the bytes as typed, before the locale decoded them
        except UnicodeDecodeError:
            raise Refused(f"{argument!a}: not UTF-8; choose another name") from None


# ---- what can be typed


def _parser() -> argparse.ArgumentParser:
    layout: Any = partial(argparse.RawDescriptionHelpFormatter, width=80, max_help_position=26)
    parser = OneLineParser(prog="python -m helpers", description=__doc__, formatter_class=layout)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=OneLineParser)
    parser.epilog = "python -m helpers COMMAND --help lists a command's flags."

    def command(name: str, does: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        epilog = f"example:\n  {EXAMPLES[name]}"
        added = commands.add_parser(name, help=text, description=f"{text}.", epilog=epilog, formatter_class=layout)
        added.set_defaults(command=does, name=name)
        return added

    def output(of: argparse.ArgumentParser) -> None:
        of.add_argument(
            "--output", default=str(paths.DEFAULT_OUTPUT), metavar="DIR", help="folder for results (default: outputs)"
        )

    device_help = "auto (default): CUDA if there is a GPU"
    homeworks = {
        name: " on CUDA, ".join(dict.fromkeys(str(by_device[device]) for device in ("cuda", "emulated")))
        + (" emulated" if by_device["cuda"] != by_device["emulated"] else "")
        for name, by_device in _homework_defaults().items()
    }

    run = command("run", _run, "run notebooks and write the report")
    run.add_argument("questions", nargs="*", metavar="QUESTION", help=f"{', '.join(NOTEBOOKS)} (default: all)")
    run.add_argument("--device", default="auto", metavar="auto|cuda|emulated", help=device_help)
    run.add_argument("--model", default="", help="default: opt-1.3b on CUDA, opt-mini emulated")
    output(run)
    options.add_arguments(run, RunSettings, "page_cache", "repeats")
    run.add_argument("--fresh", action="store_true", help="measure again; earlier results are set aside")
    run.add_argument("--dry-run", action="store_true", help="list the runs and whether they are known; start nothing")

    measure = command("measure", _measure, "measure one run, or a sweep: flags take lists such as 1,4,16")
    flexgen_command.add_arguments(measure, homeworks)
    measure.add_argument("--device", default="auto", metavar="auto|cuda|emulated", help=device_help)
    options.add_arguments(measure, RunSettings, "page_cache", "disk_reader", "copy_buffer", "repeats")
    output(measure)
    measure.add_argument("--fresh", action="store_true", help="measure even if the result is known")
    measure.add_argument(
        "--allow-long", action="store_true", help="on the emulated GPU: allow runs that take long or write much"
    )
    measure.add_argument("--json", action="store_true", help="print one JSON object")

    place = command("place", _place, "show where FlexGen puts the weights for a split")
    options.add_arguments(place, RunSettings, "split", "compress_weight")
    place.add_argument("--to", nargs="+", metavar="N", help="list each distinct placement from --percent to this split")
    place.add_argument("--model", default="opt-1.3b", help="default: opt-1.3b")
    place.add_argument("--json", action="store_true", help="print one JSON object")

    machine_help = "t4-colab, t4-gcp or a profile's file (default: this machine's, from notebook 00)"
    predict = command("predict", _predict, "predict memory and time of a run without running it")
    options.add_arguments(predict, RunSettings, *flexgen_command.FLEXGENS, defaults=homeworks)
    options.add_arguments(predict, RunSettings, "page_cache", "disk_reader", "copy_buffer")
    predict.add_argument("--machine", metavar="NAME|FILE", help=machine_help)
    predict.add_argument("--device", metavar="cuda|emulated", help="default: the machine's")
    predict.add_argument("--json", action="store_true", help="print one JSON object")

    search = command("search", _search, "find the fastest setting that fits a machine")
    search.add_argument("--model", default="opt-1.3b", help="default: opt-1.3b")
    search.add_argument("--machine", metavar="NAME|FILE", help=machine_help)
    options.add_arguments(search, RunSettings, "prompt_len", "gen_len", defaults=homeworks)
    search.add_argument("--batch-limit", type=int, metavar="N", help="sequences generated together, at most")
    search.add_argument("--latency-limit", type=float, metavar="S", help="seconds of a whole generation, at most")
    search.add_argument("--json", action="store_true", help="print one JSON object")

    analyze = command("analyze", _analyze, "make tables, plots and answers from figures alone")
    analyze.add_argument(
        "files",
        nargs="*",
        metavar="PATH",
        help="FlexGen's logs or printed output, notebooks with outputs, iostat logs, CSVs, .jsonl logs, or folders",
    )
    analyze.add_argument("--output", metavar="DIR", help="folder for the report")
    analyze.add_argument("--template", action="store_true", help="print a CSV to fill in")
    analyze.add_argument("--machine-name", metavar="NAME", default="", help="the GPU or machine that measured")
    for flag, what in (
        ("--gpu-memory", "GiB of GPU memory"),
        ("--cpu-memory", "GiB of RAM"),
        ("--disk-rate", "the disk's sequential reads in GB/s"),
    ):
        analyze.add_argument(flag, type=float, metavar="N", help=what)
    analyze.add_argument("--machine", metavar="NAME|FILE", help="take name, memory and disk rate from a profile")

    doctor = command("doctor", _doctor, "check whether this machine is ready")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _homework_defaults() -> dict[str, dict[str, Any]]:
    """The homework's model and workload by option, then by device."""
    works = {device: work.model_dump() for device, work in homework.WORKLOAD.items()}
    return {"model": homework.MODEL} | {
        name: {device: work[name] for device, work in works.items()} for name in works["cuda"]
    }


def _settings(given: argparse.Namespace, device: str) -> dict[str, RunSettings]:
    """The requested runs by name; the homework's model and workload fill in whatever wasn't given."""
    defaults = {name: by_device[device] for name, by_device in _homework_defaults().items()} | {"device": device}
    given.device = None
    runs = [RunSettings.of(**(defaults | values)) for values in options.given(given, RunSettings)]
    return {run.key: run for run in runs}


# ---- the commands


def _run(given: argparse.Namespace) -> int:
    from helpers import forecast, lab, models, results

    device = lab.choose_device(given.device)
    for question in given.questions:
        if question not in NOTEBOOKS:
            raise Refused(f"question {question!r}: choose from {', '.join(NOTEBOOKS)}")
    if given.model:
        models.resolve(given.model)
    (common,) = _one_of_each(given)
    plan: dict[str, RunSettings] = {}
    for question in given.questions or QUESTIONS:
        if question in WITH_RUNS:
            plan |= homework.plan(question, device, given.model, **common)
    output = paths.folder(given.output, "--output").resolve()  # notebooks run in a folder of their own
    if given.dry_run:
        plan, slow = forecast.affordable(plan, output, given.fresh)
        for name, seconds in slow.items():
            print(f"{name:18} {'left out':10} optional, {forecast.in_words(seconds)} on this machine")
        unknown = list(plan) if given.fresh else lab.without_figures(plan, output)
        for name, settings in plan.items():
            print(f"{name:18} {'would run' if name in unknown else 'known':10} {lab.describe(settings)}")
        _say(f"{len(unknown)} of {len(plan)} runs would start; results are kept in {output / results.LOG_NAME}")
        return DONE

    from helpers import suite

    model = str(models.local_folder(given.model) or given.model) if given.model else ""
    parameters = {"device": device, "model": model, **common, "output_dir": str(output)}
    ran = suite.run(given.questions or list(suite.NOTEBOOKS), parameters, output, given.fresh, _say)
    broken = any(one.error for one in ran)
    ladder = {row.id for row in homework.FASTER}  # its page may predict a run instead, and the report doesn't show it
    plan = {name: settings for name, settings in plan.items() if name not in ladder}
    if not plan:
        return FAILED if broken else DONE
    missing = lab.without_figures(forecast.affordable(plan, output)[0], output)
    if missing:
        _say(f"no figures for {', '.join(missing)}: the tables say why")
    try:
        written = suite.write_report(output)
        _say(f"report: {next(path for path in written if path.suffix == '.html')}")
    except Refused as refused:  # runs had started, so this is a failure
        _say(f"no report: {refused}")
        return FAILED
    return FAILED if missing or broken else DONE


def _one_of_each(given: argparse.Namespace) -> list[dict[str, Any]]:
    """The page cache and repeats of the `run` command, one value each."""
    chosen = argparse.Namespace(page_cache=given.page_cache or "natural", repeats=given.repeats or "3")
    found = options.given(chosen, RunSettings)
    if len(found) > 1:
        raise Refused("run: --page-cache and --repeats take one value; measure takes lists")
    return found


def _measure(given: argparse.Namespace) -> int:
    from helpers import lab, results
    from helpers.predict.figures import placement_of
    from helpers.printing import lines

    if given.pasted:
        pasted = flexgen_command.parse(given.pasted)
        device = pasted.device or given.device
        given = argparse.Namespace(
            **{name: value if value is not None else getattr(pasted, name, None) for name, value in vars(given).items()}
        )
        given.device = device
    elif given.split is None:
        raise Refused("--percent is missing: six numbers, such as --percent 50 0 100 0 100 0")
    for remark in flexgen_command.remarks(given):
        _say(remark)
    device = lab.choose_device(given.device)
    runs = _settings(given, device)
    output = paths.folder(given.output, "output folder")
    unknown = set(runs) if given.fresh else set(lab.without_figures(runs, output))
    sweep = lab.run(
        runs, output, fresh=given.fresh, offload_root=given.offload_dir, allow_long=given.allow_long, say=_say
    )
    log = output / results.LOG_NAME
    figures = [
        record.as_json() | {"known": name not in unknown, "results": str(log)} for name, record in sweep.records.items()
    ]
    for one in figures:
        known = f"known since {one['started_at']}, measured earlier and recorded in {log}; --fresh measures again"
        _say(known if one["known"] else f"recorded in {log}")
    if given.json:
        print(json.dumps(figures[0] if len(figures) == 1 else {"runs": figures}))
    else:
        texts = {name: placement_of(run) for name, run in runs.items()}
        print("\n\n".join(lines(one | {"achieved": text}) for one, text in zip(figures, texts.values())))
    failures = [record.failure for record in sweep.records.values() if record.failure]
    if failures and all(failure.kind == "refused" for failure in failures):
        return REFUSED
    return FAILED if failures else DONE


def _place(given: argparse.Namespace) -> int:
    from helpers import models
    from helpers.placement import TIERS, asked_and_achieved, place
    from helpers.predict import search

    model = models.resolve(given.model)
    if not given.split:
        raise Refused("--percent is missing: FlexGen's six numbers, such as --percent 50 50 100 0 100 0")
    (asked,) = options.given(argparse.Namespace(split=given.split, compress_weight=given.compress_weight), RunSettings)
    split, compress = asked["split"], asked.get("compress_weight", False)
    splits = [split]
    if given.to is not None:
        end = OffloadSplit.parse(given.to)
        if split.percent[2:] != end.percent[2:]:
            raise Refused(f"--to {end}: only the weights may differ from --percent {split}, not cache or activations")
        splits = list(search.distinct_placements(model, split, end))
    found = [asked_and_achieved(model, one, compress) for one in splits]
    if given.json:
        print(json.dumps(found if given.to is not None else found[0]))
    elif given.to is not None:
        print(f"{model.name}: {len(splits)} placements from --percent {split} to {end}")
        for one in splits:
            placed = place(model, one.weights_gpu, one.weights_cpu, compress)
            shares = ((placed.percent(tier), tier) for tier in TIERS)
            achieved = " + ".join(f"{share:.3f} % {tier}" for share, tier in shares if share)
            print(f"--percent {one!s:24} achieved {achieved}")
    else:
        print(f"{model.name}, --percent {split}{', 4-bit weights' if compress else ''}")
        for tier in TIERS:
            asked_percent, achieved = found[0]["asked"][f"{tier}_percent"], found[0]["achieved"]
            print(
                f"{tier:5} asked {asked_percent:3d} %   "
                f"achieved {achieved[f'{tier}_percent']:5.1f} %   {achieved[f'{tier}_gib']:.3f} GiB"
            )
    return DONE


def _profile(given: argparse.Namespace) -> Any:
    """The named machine, or this one: emulated, or as measured by notebook 00."""
    from helpers.machine import profiles
    from helpers.machine.emulation import EMULATED_T4

    if given.machine:
        return EMULATED_T4 if given.machine in ("emulated", EMULATED_T4.name) else profiles.load(given.machine)
    if getattr(given, "device", None) == "emulated":
        return EMULATED_T4
    kept = profiles.kept_in(paths.DEFAULT_OUTPUT)
    if kept is None:
        names = ", ".join(profiles.PROFILES)
        raise Refused(f"--machine is missing: {names} or a profile's file; notebook 00 makes this machine's profile")
    _say(f"machine: {kept.name}, from {paths.DEFAULT_OUTPUT / profiles.PROFILE_NAME}")
    return kept


def _predict(given: argparse.Namespace) -> int:
    from helpers.machine.emulation import EMULATED_T4
    from helpers.predict import figures, time_model

    if given.split is None:
        raise Refused("--percent is missing: six numbers, such as --percent 50 0 100 0 100 0")
    profile = _profile(given)
    device = given.device or ("emulated" if profile == EMULATED_T4 else "cuda")
    if device not in homework.MODEL:
        raise Refused(f"--device {device}: choose cuda or emulated")
    predicted = [(run, time_model.predict(run, profile)) for run in _settings(given, device).values()]
    found = [figures.prediction_as_json(run, one, profile) for run, one in predicted]
    if given.json:
        print(json.dumps(found[0] if len(found) == 1 else {"runs": found}))
    else:
        print("\n\n".join(figures.prediction_as_text(run, one, profile) for run, one in predicted))
    return DONE


def _search(given: argparse.Namespace) -> int:
    from tqdm import tqdm

    from helpers.predict import figures, search

    profile = _profile(given)
    lengths = (
        homework.WORKLOAD["cuda"].model_dump()
        | options.given(argparse.Namespace(prompt_len=given.prompt_len, gen_len=given.gen_len), RunSettings)[0]
    )
    with tqdm(total=100, desc=f"settings of {given.model}", unit="%", leave=False, disable=None, ncols=80) as bar:
        found = search.best(
            given.model,
            profile,
            lengths["prompt_len"],
            lengths["gen_len"],
            given.batch_limit,
            given.latency_limit,
            on_progress=lambda share: bar.update(round(100 * share) - bar.n),
        )
    if given.json:
        print(json.dumps(figures.search_as_json(found, given.model, profile)))
    else:
        print(figures.search_as_text(found, profile))
    return DONE


def _analyze(given: argparse.Namespace) -> int:
    from helpers.analysis import readers
    from helpers.analysis.readers.figures_csv import TEMPLATE
    from helpers.report import document

    if given.template:
        print(TEMPLATE, end="")
        return DONE
    if not given.files or given.output is None:
        raise Refused(f"{'--output' if given.files else 'PATH'} is missing: analyze PATH... --output DIR")
    profile = _profile(given) if given.machine else None
    about = readers.About(
        given.machine_name or (profile.name if profile else ""),
        given.gpu_memory or (profile.gpu_mem_gib if profile else None),
        given.cpu_memory or (profile.host_ram_gib if profile else None),
        given.disk_rate or (profile.disk_gb_s if profile else None),
    )
    written = document.analyze(given.files, given.output, about, _say)
    print(f"report: {next(path for path in written if path.suffix == '.html')}")
    print(f"next to it: report.md, tables/, figures/ ({len(written)} files in all)")
    return DONE


def _doctor(given: argparse.Namespace) -> int:
    from helpers.setup import doctor

    checks = doctor.check()
    report = doctor.as_json(checks)
    print(json.dumps(report) if given.json else "\n".join(map(str, checks)))
    return DONE if report["ready"] else FAILED


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _replace_closed_streams() -> None:
    """Give a process started with `>&-` a stdout, or the next file it opens would take its descriptor."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    nowhere = os.fdopen(number, "w")
    sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere


if __name__ == "__main__":
    _replace_closed_streams()
    for asked_to_end in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(asked_to_end) is not signal.SIG_IGN:  # ignored under nohup
            signal.signal(asked_to_end, signal.default_int_handler)  # ends like Ctrl-C
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore further Ctrl-Cs
    sys.exit(code)
