"""The command line: `python -m helpers COMMAND`. Exit codes: 0 done, 1 something failed, 2 refused before a start."""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from helpers import paths
from helpers.errors import Refused, say_warning
from helpers.homework import QUESTIONS

PERCENT = "GPU and CPU share of weights, of KV cache, of activations: WG WC CG CC AG AC; the rest goes to disk"
DONE, FAILED, REFUSED = 0, 1, 2
PREDICTED_WITHIN = 0.1  # about what predictions are off by on the mean, on machines they were judged on: README.md
NOTEBOOKS_WITHOUT_RUNS = ("machine", "explore", "faster")  # of the homework's; `run` takes their names too


class OneLineParser(argparse.ArgumentParser):
    """An argparse parser that refuses in one line."""

    def error(self, message: str) -> NoReturn:
        raise Refused(message)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        given = sys.argv[1:] if arguments is None else arguments
        _check_text(given)
        options = _parser().parse_args(given)
        with warnings.catch_warnings():
            warnings.showwarning = say_warning
            code = options.command(options)
            sys.stdout.flush()
            return code
    except Refused as error:
        print(f"refused: {error}", file=sys.stderr)
        return REFUSED
    except OSError as error:  # a disk that is full, a file that is gone: something was started
        if isinstance(error, BrokenPipeError) and _nobody_reads_on():
            return DONE
        where = f", writing to {options.output}" if error.filename is None and "output" in options else ""
        print(f"failed: {error}{where}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept, and the same command goes on from there", file=sys.stderr)
        return FAILED


def _nobody_reads_on() -> bool:
    """Whether who read stdout has had enough, as `| head` has: then what is left to say goes nowhere."""
    stdout = select.poll()
    stdout.register(sys.stdout, 0)
    gone = any(event & select.POLLERR for _, event in stdout.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return gone


def _check_text(arguments: Sequence[str]) -> None:
    """Raises Refused for a name in bytes that are no text: neither a table nor a report could hold it."""
    for argument in arguments:
        try:
            os.fsencode(argument).decode("utf-8")  # the bytes as they were typed, whatever the locale made of them
        except UnicodeDecodeError:
            raise Refused(f"{argument!a}: not UTF-8; choose another name") from None


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="python -m helpers", description=__doc__)
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=OneLineParser)
    parser.set_defaults(command=lambda _: parser.error(f"no COMMAND (choose from {', '.join(commands.choices)})"))

    run = commands.add_parser("run", help="run notebooks through papermill and write the report")
    names = ", ".join([*QUESTIONS, *NOTEBOOKS_WITHOUT_RUNS])
    run.add_argument("questions", nargs="*", metavar="QUESTION", help=f"{names}; none: every notebook")
    run.add_argument("--device", default="auto", help="auto, cuda or emulated")
    run.add_argument("--model", default="", help="default: opt-1.3b on CUDA, opt-mini emulated")
    run.add_argument(
        "--output", default=str(paths.DEFAULT_OUTPUT), metavar="DIR", help="default: outputs/ of the project"
    )
    run.add_argument("--page-cache", default="natural", help="natural or cold")
    run.add_argument(
        "--repeats",
        type=int,
        default=3,
        metavar="N",
        help="times that each run is measured, fewer once that took a minute (default: 3)",
    )
    run.add_argument("--fresh", action="store_true", help="measure anew; earlier results are set aside")
    run.add_argument("--dry-run", action="store_true", help="list the runs and which are known already, start nothing")
    run.set_defaults(command=_run)

    measure = commands.add_parser("measure", help="one run")
    _add_settings(measure, "opt-1.3b on CUDA, opt-mini emulated")
    measure.add_argument("--device", default="auto", help="auto, cuda or emulated")
    measure.add_argument("--page-cache", default="natural", help="natural or cold")
    measure.add_argument("--disk-reader", default="stock", help="stock, or direct: weights by O_DIRECT")
    measure.add_argument("--copy-buffer", default="stock", help="stock: 8 GiB, pinned; or fit: the largest tensor")
    measure.add_argument(
        "--repeats",
        type=int,
        default=3,
        metavar="N",
        help="times to measure, fewer once that took a minute (default: 3)",
    )
    measure.add_argument("--offload-dir", default=None, metavar="DIR", help="where the disk tier is put during the run")
    measure.add_argument(
        "--output", default=str(paths.DEFAULT_OUTPUT), metavar="DIR", help="default: outputs/ of the project"
    )
    measure.add_argument("--fresh", action="store_true", help="measure even if the result is known")
    measure.add_argument("--json", action="store_true")
    measure.set_defaults(command=_measure)

    place = commands.add_parser("place", help="where FlexGen puts the weights for a split")
    place.add_argument("--percent", nargs="+", required=True, metavar="N", help=PERCENT)
    place.add_argument(
        "--to", nargs="+", metavar="N", help="another split: list each placement there is from one to the other, once"
    )
    place.add_argument("--model", default="opt-1.3b", help="default: opt-1.3b")
    place.add_argument("--compress-weight", action="store_true")
    place.add_argument("--json", action="store_true")
    place.set_defaults(command=_place)

    predict = commands.add_parser("predict", help="memory and time of a run on a machine, without running it")
    _add_settings(predict, "opt-1.3b")
    predict.add_argument("--machine", required=True, metavar="NAME|FILE", help="a machine profile")
    predict.add_argument("--json", action="store_true")
    predict.set_defaults(command=_predict)

    search = commands.add_parser("search", help="the fastest setting that fits a machine")
    search.add_argument("--model", default="opt-1.3b", help="default: opt-1.3b")
    search.add_argument("--machine", required=True, metavar="NAME|FILE", help="a machine profile")
    search.add_argument("--prompt-len", type=int, default=128, help="default: 128")
    search.add_argument("--gen-len", type=int, default=16, help="default: 16")
    search.add_argument("--json", action="store_true")
    search.set_defaults(command=_search)

    analyze = commands.add_parser("analyze", help="tables, plots and answers from figures alone")
    analyze.add_argument("file", metavar="RESULTS", help="a .jsonl log, or a .csv with the reference's columns")
    analyze.add_argument("--output", required=True, metavar="DIR")
    analyze.set_defaults(command=_analyze)

    doctor = commands.add_parser("doctor", help="is this machine ready? one line a check")
    doctor.add_argument("--json", action="store_true")
    doctor.set_defaults(command=_doctor)
    return parser


def _add_settings(parser: argparse.ArgumentParser, model: str) -> None:
    """FlexGen's own flags, by its own names."""
    parser.add_argument("--percent", nargs="+", required=True, metavar="N", help=PERCENT)
    parser.add_argument("--model", default="", help=f"default: {model}")
    parser.add_argument("--prompt-len", type=int)
    parser.add_argument("--gen-len", type=int)
    parser.add_argument("--gpu-batch-size", type=int)
    parser.add_argument("--num-gpu-batches", type=int)
    parser.add_argument("--compress-weight", action="store_true")
    parser.add_argument("--compress-cache", action="store_true")
    parser.add_argument("--cpu-cache-compute", action="store_true")
    parser.add_argument("--attn-sparsity", type=float, default=1.0)
    parser.add_argument("--overlap", type=_flexgen_bool, default=True, metavar="BOOL")
    parser.add_argument("--pin-weight", type=_flexgen_bool, default=True, metavar="BOOL")
    parser.add_argument("--debug-mode", default=None, help="breakdown or fewer_batch")


def _flexgen_bool(text: str) -> bool:
    """FlexGen's `str2bool`."""
    if text.lower() in ("yes", "true", "t", "y", "1"):
        return True
    if text.lower() in ("no", "false", "f", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def _settings(options: argparse.Namespace, device: str, **more: Any) -> Any:
    from helpers import homework
    from helpers.settings import OffloadSplit, RunSettings, Workload

    asked = {
        name: getattr(options, name)
        for name in ("gpu_batch_size", "num_gpu_batches", "prompt_len", "gen_len")
        if getattr(options, name) is not None
    }
    return RunSettings(
        model=options.model or homework.MODEL[device],
        split=OffloadSplit.parse(options.percent),
        workload=Workload(**{**homework.WORKLOAD[device].model_dump(), **asked}),
        device=device,
        compress_weight=options.compress_weight,
        compress_cache=options.compress_cache,
        cpu_cache_compute=options.cpu_cache_compute,
        attn_sparsity=options.attn_sparsity,
        overlap=options.overlap,
        pin_weight=options.pin_weight,
        debug_mode=options.debug_mode,
        **more,
    )


def _run(options: argparse.Namespace) -> int:
    from helpers import forecast, homework, lab, models, results

    device = lab.choose_device(options.device)
    if options.page_cache not in ("natural", "cold"):
        raise Refused(f"--page-cache {options.page_cache}: choose natural or cold")
    if options.model:
        models.resolve(options.model)
    plan = {}
    for question in options.questions or QUESTIONS:
        if question not in (*QUESTIONS, *NOTEBOOKS_WITHOUT_RUNS):
            raise Refused(f"question {question!r}: choose from {', '.join((*QUESTIONS, *NOTEBOOKS_WITHOUT_RUNS))}")
        if question in NOTEBOOKS_WITHOUT_RUNS:
            continue
        plan |= homework.plan(question, device, options.model, options.page_cache, options.repeats)
    # Notebooks run in a folder of their own: no path may be relative.
    output = paths.folder(options.output, "--output").resolve()
    if options.dry_run:
        plan, dear = forecast.affordable(plan, output, options.fresh)
        for name, seconds in dear.items():
            print(f"{name:18} {'left out':10} beside the homework, {forecast.in_words(seconds)} on this machine")
        unknown = list(plan) if options.fresh else lab.without_figures(plan, output)
        for name, settings in plan.items():
            print(f"{name:18} {'would run' if name in unknown else 'known':10} {lab.describe(settings)}")
        _say(f"{len(unknown)} of {len(plan)} runs would start; results are kept in {output / results.LOG_NAME}")
        return DONE

    from helpers import suite

    folder = models.local_folder(options.model) if options.model else None
    parameters = {
        "device": device,
        "model": str(folder or options.model),
        "page_cache": options.page_cache,
        "repeats": options.repeats,
        "output_dir": str(output),
    }
    runs = suite.run(options.questions or list(suite.NOTEBOOKS), parameters, output, options.fresh, _say)
    broken = any(one.error for one in runs)
    if not plan:
        return FAILED if broken else DONE
    missing = lab.without_figures(forecast.affordable(plan, output)[0], output)
    if missing:
        _say(f"no figures for {', '.join(missing)}: the tables say why")
    try:
        written = suite.write_report(output)
        _say(f"report: {next(path for path in written if path.suffix == '.html')}")
    except Refused as refused:  # something was started: what came of it is not refused, it failed
        _say(f"no report: {refused}")
        return FAILED
    return FAILED if missing or broken else DONE


def _measure(options: argparse.Namespace) -> int:
    from helpers import lab, paths, results

    device = lab.choose_device(options.device)
    settings = _settings(
        options,
        device,
        page_cache=options.page_cache,
        disk_reader=options.disk_reader,
        copy_buffer=options.copy_buffer,
        repeats=options.repeats,
    )
    output = paths.folder(options.output, "output folder")
    known = not options.fresh and not lab.without_figures({"it": settings}, output)
    sweep = lab.run(settings, output, fresh=options.fresh, offload_root=options.offload_dir, say=_say)
    (record,) = sweep.records.values()
    log = output / results.LOG_NAME
    if known:
        _say(f"known since {record.started_at}, measured earlier and recorded in {log}; --fresh measures again")
    else:
        _say(f"recorded in {log}")
    figures = {
        "status": record.failure.kind if record.failure else record.status,
        "device": settings.device,
        "kind": record.kind,
        "machine": record.machine.name,
        "model": record.settings.model,
        "percent": str(settings.split),
        "achieved": _achieved(settings),
        "started_at": record.started_at,
        "known": known,
        "results": str(log),
        "total_throughput_tok_s": record.total_throughput_tok_s,
        "total_throughputs_tok_s": list(record.throughputs_tok_s),
        "prefill_latency_s": record.prefill_latency_s,
        "decode_latency_s": record.decode_latency_s,
        "total_latency_s": record.total_latency_s,
        "peak_gpu_mem_gib": record.peak_gpu_mem_gib,
        "bytes_from_disk": record.bytes_from_disk,
        "bytes_expected_from_disk": record.bytes_expected_from_disk,
        "projected": record.projected,
        "weights": record.weights,
        "command": settings.flexgen_command,
        "notes": list(record.notes),
        "reason": record.failure.message if record.failure else None,
    }
    _print(figures, options.json, {"achieved": str(_placement(settings))})
    if record.failure and record.failure.kind == "refused":
        return REFUSED
    return FAILED if record.failure else DONE


def _place(options: argparse.Namespace) -> int:
    from helpers import models
    from helpers.placement import TIERS, asked_and_achieved
    from helpers.settings import OffloadSplit

    split, model = OffloadSplit.parse(options.percent), models.resolve(options.model)
    if options.to is not None:
        return _placements_between(options, model, split, OffloadSplit.parse(options.to))
    found = asked_and_achieved(model, split, options.compress_weight)
    if options.json:
        print(json.dumps(found))
        return DONE
    print(f"{found['model']}, --percent {split}{', 4-bit weights' if options.compress_weight else ''}")
    for tier in TIERS:
        achieved = found["achieved"]
        print(
            f"{tier:5} asked {found['asked'][f'{tier}_percent']:3d} %   "
            f"achieved {achieved[f'{tier}_percent']:5.1f} %   {achieved[f'{tier}_gib']:.3f} GiB"
        )
    return DONE


def _placements_between(options: argparse.Namespace, model: Any, start: Any, end: Any) -> int:
    """Each distinct placement on the way from one split to another: what a sweep has to measure."""
    from helpers.placement import TIERS, asked_and_achieved, place
    from helpers.predict import search

    if start.percent[2:] != end.percent[2:]:
        raise Refused(f"--to {end}: the weights alone may differ from --percent {start}, not the cache or activations")
    splits = search.distinct_placements(model, start, end)
    if options.json:
        print(json.dumps([asked_and_achieved(model, split, options.compress_weight) for split in splits]))
        return DONE
    print(f"{model.name}: {len(splits)} placements from --percent {start} to {end}")
    for split in splits:
        placed = place(model, split.weights_gpu, split.weights_cpu, options.compress_weight)
        shares = {tier: placed.percent(tier) for tier in TIERS}
        achieved = " + ".join(f"{share:.3f} % {tier}" for tier, share in shares.items() if share)  # a vector is little
        print(f"--percent {split!s:24} achieved {achieved}")
    return DONE


def _predict(options: argparse.Namespace) -> int:
    from helpers.machine import profiles
    from helpers.predict import time_model

    profile = profiles.load(options.machine)
    settings = _settings(options, "cuda")
    found = time_model.predict(settings, profile)
    placement = _placement(settings)
    reason = None if found.fits else _what_does_not_fit(found, profile)
    figures = {
        "kind": "predicted",
        "machine": profile.name,
        "model": settings.model,
        "percent": str(settings.split),
        "achieved": _achieved(settings),
        "fits": found.fits,
        "reason": reason,
        "total_throughput_tok_s": found.total_throughput_tok_s,
        "total_throughput_tok_s_bounds": list(found.total_throughput_tok_s_bounds),
        "prefill_latency_s": found.prefill_latency_s,
        "decode_latency_s": found.decode_latency_s,
        "total_latency_s": found.total_latency_s,
        "bottleneck": found.bottleneck,
        "terms_s": found.terms_s,
        "peak_gpu_mem_gib": found.peak_gpu_mem_gib,
        "peak_gpu_mem_gib_range": list(found.peak_gpu_mem_gib_range),
        "host_mem_gib": found.host_mem_gib,
        "page_cache_serves_disk": found.page_cache_serves_disk,
        "command": settings.flexgen_command,
    }
    if reason and not options.json:
        print(f"does not fit: {reason}; time and throughput are as if there were enough")
    longest = {name: seconds for name, seconds in found.terms_s.items() if seconds > 1e-3 * found.total_latency_s}
    _print(
        figures,
        options.json,
        {
            "achieved": str(placement),
            "reason": None,
            "terms_s": f"\n{'':30} ".join(f"{name} {_in_words(seconds)} s" for name, seconds in longest.items()),
        },
    )
    return DONE


def _what_does_not_fit(found: Any, profile: Any) -> str:
    """Which memory a prediction needs more of than the machine has for it, in GiB."""
    from helpers.units import GIB

    memories = (
        ("GPU memory", found.peak_gpu_mem_gib_range[1], profile.usable_gpu_bytes / GIB, profile.gpu_overhead_gib),
        ("host memory", found.host_mem_gib, profile.usable_host_bytes / GIB, profile.host_overhead_gib),
    )
    return "; ".join(
        f"needs {needed_gib:.2f} GiB of {what}, {profile.name} has {usable_gib:.2f} "
        f"(and {overhead_gib:.2f} that Python, torch and CUDA take)"
        for what, needed_gib, usable_gib, overhead_gib in memories
        if needed_gib > usable_gib
    )


def _search(options: argparse.Namespace) -> int:
    from helpers.machine import profiles
    from helpers.predict import search

    profile = profiles.load(options.machine)
    found = search.best(options.model, profile, options.prompt_len, options.gen_len)
    ranked = (found.best, *found.runners_up)
    choices = [
        {
            "percent": str(choice.settings.split),
            "achieved": _achieved(choice.settings),
            "gpu_batch_size": choice.settings.workload.gpu_batch_size,
            "num_gpu_batches": choice.settings.workload.num_gpu_batches,
            "compress_weight": choice.settings.compress_weight,
            "compress_cache": choice.settings.compress_cache,
            "cpu_cache_compute": choice.settings.cpu_cache_compute,
            "total_throughput_tok_s": choice.prediction.total_throughput_tok_s,
            "peak_gpu_mem_gib": choice.prediction.peak_gpu_mem_gib,
            "host_mem_gib": choice.prediction.host_mem_gib,
            "bottleneck": choice.prediction.bottleneck,
            "command": choice.command,
        }
        for choice in ranked
    ]
    if options.json:
        print(
            json.dumps(
                {
                    "kind": "predicted",
                    "machine": profile.name,
                    "model": options.model,
                    "compared": found.compared,
                    "limit": found.limit,
                    "best": choices[0],
                    "runners_up": choices[1:],
                }
            )
        )
        return DONE
    print(f"predicted for {profile.name}, the best of {found.compared:,} settings that fit; {found.limit}")
    for choice, figures in zip(ranked, choices):
        split = choice.settings.split
        print(
            f"{figures['total_throughput_tok_s']:9.2f} token/s  {figures['peak_gpu_mem_gib']:7.2f} GiB GPU  "
            f"{figures['host_mem_gib']:7.2f} GiB host  {figures['bottleneck']:16}  {figures['command']}\n"
            f"{'':9}  weights: asked {split.weights_gpu} % GPU + {split.weights_cpu} % CPU + "
            f"{split.weights_disk} % disk, achieved {_placement(choice.settings)}"
        )
    least = (1 - PREDICTED_WITHIN) * choices[0]["total_throughput_tok_s"]
    alike = sum(figures["total_throughput_tok_s"] >= least for figures in choices)
    if alike > 1:
        print(
            f"the first {alike} are within {100 * PREDICTED_WITHIN:.0f} % of the fastest, and predictions are hardly "
            "surer than that: only measuring tells which is the fastest"
        )
    return DONE


def _print(figures: dict[str, Any], as_json: bool, for_people: dict[str, Any]) -> None:
    """One JSON object, or a line a figure; `for_people` has what reads otherwise there."""
    if as_json:
        print(json.dumps(figures))
        return
    for name, figure in (figures | for_people).items():
        if name in ("reason", "notes") and not figure:
            continue
        print(f"{name:30} {_in_words(figure)}")


def _in_words(figure: Any) -> str:
    """A figure as people read it: four significant digits, a list with commas."""
    if figure is None:
        return "not measured"
    if isinstance(figure, list):
        return ", ".join(map(_in_words, figure))
    if isinstance(figure, float):
        return f"{figure:.4g}" if abs(figure) < 1e4 else f"{figure:.0f}"
    return str(figure)


def _achieved(settings: Any) -> dict[str, float]:
    """Percent and GiB by tier, as `place --json` has them."""
    from helpers.placement import asked_and_achieved

    return asked_and_achieved(settings.opt_model, settings.split, settings.compress_weight)["achieved"]


def _placement(settings: Any) -> Any:
    from helpers.placement import place

    split = settings.split
    return place(settings.opt_model, split.weights_gpu, split.weights_cpu, settings.compress_weight)


def _analyze(options: argparse.Namespace) -> int:
    from helpers.report import document

    written = document.analyze(options.file, options.output)
    print(f"report: {next(path for path in written if path.suffix == '.html')}")
    print(f"beside it: report.md, tables/, figures/ ({len(written)} files in all)")
    return DONE


def _doctor(options: argparse.Namespace) -> int:
    from helpers.setup import doctor

    checks = doctor.check()
    report = doctor.as_json(checks)
    if options.json:
        print(json.dumps(report))
    else:
        print(*checks, sep="\n")
    return DONE if report["ready"] else FAILED


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _replace_closed_streams() -> None:
    """Started with `>&-`, what is opened next would be taken for stdout, and written into."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    nowhere = os.fdopen(number, "w")
    sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere


if __name__ == "__main__":
    _replace_closed_streams()
    for asked_to_end in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(asked_to_end) is not signal.SIG_IGN:  # as under nohup
            signal.signal(asked_to_end, signal.default_int_handler)  # it ends as by Ctrl-C
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # another Ctrl-C ends nothing any more
    sys.exit(code)
