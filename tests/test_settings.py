"""Settings: what FlexGen would crash on, or run as something else, is refused first, in one line that says why."""

from __future__ import annotations

import argparse
import shlex

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from factories import mini, save_config
from helpers import models
from helpers.engine import patches
from helpers.errors import Refused
from helpers.settings import SHORTEST_PROMPT, OffloadSplit, RunSettings, Workload

PAIRS = st.integers(0, 100).flatmap(lambda gpu: st.tuples(st.just(gpu), st.integers(0, 100 - gpu)))
ACTIVATIONS = st.sampled_from([(100, 0), (0, 100), (0, 0)])
SPLITS = st.builds(lambda *pairs: OffloadSplit.parse(sum(pairs, ())), PAIRS, PAIRS, ACTIVATIONS)


@st.composite
def all_settings(draw):
    """Any run that can be asked for."""
    compress_cache = draw(st.booleans())
    cache = ACTIVATIONS if compress_cache else PAIRS
    split = OffloadSplit.parse(draw(PAIRS) + draw(cache) + draw(ACTIVATIONS))
    sparse = not compress_cache and not split.cache_is_mixed and draw(st.booleans())
    return RunSettings(
        model=draw(st.sampled_from(sorted(models.KNOWN_MODELS))),
        split=split,
        workload=Workload(
            gpu_batch_size=draw(st.integers(1, 64)),
            num_gpu_batches=draw(st.integers(1, 8)),
            prompt_len=draw(st.integers(SHORTEST_PROMPT, 256)),
            gen_len=draw(st.integers(8, 256)),
        ),
        device=draw(st.sampled_from(["cuda", "emulated"])),
        compress_weight=draw(st.booleans()),
        compress_cache=compress_cache,
        overlap=draw(st.booleans()),
        pin_weight=draw(st.booleans()),
        cpu_cache_compute=draw(st.booleans()),
        attn_sparsity=draw(st.floats(0.01, 1)) if sparse else 1.0,
        debug_mode=draw(st.sampled_from([None, "breakdown", "fewer_batch"])),
        page_cache=draw(st.sampled_from(["natural", "cold"])),
        disk_reader=draw(st.sampled_from(["stock", "direct"])),
        copy_buffer=draw(st.sampled_from(["stock", "fit"])),
        repeats=draw(st.integers(1, 5)),
    )


def refusal(action, *arguments, **fields):
    """What is said when this is refused: one line."""
    with pytest.raises(Refused) as refused:
        action(*arguments, **fields)
    message = str(refused.value)
    assert message and "\n" not in message
    return message


# ---- the six numbers


@pytest.mark.parametrize(
    "numbers, named",
    [
        ("100 0 100 0 100", "5 numbers"),
        ("100 0 100 0 100 0 0", "7 numbers"),
        ("", "0 numbers"),
        ("100", "1 number,"),
        ("70,30,100,0,100,0", "takes 6, separated by spaces"),
        ("50.5 49.5 100 0 100 0", "50.5"),
        ("fifty 50 100 0 100 0", "fifty"),
        ("-10 110 100 0 100 0", "-10"),
        ("0 101 100 0 100 0", "101"),
        ("60 60 100 0 100 0", "60 + 60 = 120"),
        ("50 50 70 31 100 0", "70 + 31 = 101"),
        ("50 50 100 0 50 50", "50 50 (activations)"),
        ("50 50 100 0 99 0", "99 0 (activations)"),
        ((True, 0, 100, 0, 100, 0), "True"),
        ((None, 0, 100, 0, 100, 0), "None"),
    ],
)
def test_a_split_that_flexgen_cannot_run_is_refused_with_the_number(numbers, named):
    assert named in refusal(OffloadSplit.parse, numbers)


@given(st.lists(st.integers(-1000, 1000), min_size=6, max_size=6))
def test_any_six_integers_are_a_split_or_refused_in_one_line(numbers):
    try:
        split = OffloadSplit.parse(numbers)
    except Refused as refused:
        assert "\n" not in str(refused)
        return
    assert list(split.percent) == numbers
    for gpu, cpu, disk in (
        (split.weights_gpu, split.weights_cpu, split.weights_disk),
        (split.cache_gpu, split.cache_cpu, split.cache_disk),
    ):
        assert min(gpu, cpu, disk) >= 0 and gpu + cpu + disk == 100


@given(SPLITS)
def test_a_split_reads_what_it_writes(split):
    assert OffloadSplit.parse(str(split)) == split == OffloadSplit.parse(split.percent)


# ---- workload and options


@pytest.mark.parametrize(
    "field, value",
    [
        ("gpu_batch_size", 0),
        ("num_gpu_batches", 0),
        ("gen_len", 0),
        ("prompt_len", SHORTEST_PROMPT - 1),
        ("gpu_batch_size", 10**9),
        ("num_gpu_batches", 10**7),
        ("gpu_batch_size", 4.0),
        ("gen_len", "16"),
        ("prompt_len", True),
    ],
)
def test_a_workload_that_is_none_is_refused(field, value):
    message = refusal(Workload, **{field: value})
    assert field in message and repr(value) in message


def test_the_effective_batch_is_the_product():
    work = Workload(gpu_batch_size=4, num_gpu_batches=3, gen_len=5)
    assert (work.effective_batch, work.generated_tokens) == (12, 60)


@pytest.mark.parametrize("model", ["opt-1.3b", "opt-mini", "opt-175b"])
def test_more_positions_than_the_model_has_are_refused(model):
    most = models.resolve(model).max_positions
    assert mini(model=model, workload=Workload(prompt_len=most - 48, gen_len=48))
    message = refusal(mini, model=model, workload=Workload(prompt_len=most - 48, gen_len=49))
    assert f"{most - 48} + gen_len 49 = {most + 1}" in message and f"{most} positions" in message


@pytest.mark.parametrize(
    "percent, options, named",
    [
        ("50 50 50 50 100 0", {"compress_cache": True}, "50 50 50 50 100 0"),
        ("50 50 50 50 100 0", {"attn_sparsity": 0.5}, "0.5"),
        ("50 50 100 0 100 0", {"attn_sparsity": 0.5, "compress_cache": True}, "0.5"),
        ("50 50 100 0 100 0", {"attn_sparsity": 0.0}, "attn_sparsity=0.0"),
        ("50 50 100 0 100 0", {"attn_sparsity": 1.5}, "attn_sparsity=1.5"),
        ("50 50 100 0 100 0", {"attn_sparsity": float("nan")}, "attn_sparsity=nan"),
        ("50 50 100 0 100 0", {"debug_mode": "quick"}, "debug_mode='quick'"),
        ("50 50 100 0 100 0", {"debug_mode": "breakdown", "workload": Workload(gen_len=2)}, "gen_len 2"),
        ("50 50 100 0 100 0", {"device": "tpu"}, "device='tpu'"),
        ("50 50 100 0 100 0", {"page_cache": "hot"}, "page_cache='hot'"),
        ("50 50 100 0 100 0", {"repeats": 0}, "repeats=0"),
        ("50 50 100 0 100 0", {"batch": 4}, "batch=4"),
        ("50 50 100 0 100 0", {"overlap": "false"}, "overlap='false'"),
        ("50 50 100 0 100 0", {"model": "opt-350m"}, "opt-350m"),
        ("50 50 100 0 100 0", {"model": "gpt2"}, "'gpt2'"),
    ],
)
def test_an_unsupported_option_is_refused_with_its_value(percent, options, named):
    assert named in refusal(mini, percent, **options)


def test_the_shortest_debug_run_has_more_than_ten_decode_steps():
    """FlexGen projects from the mean of `costs[10:]`: with 10 steps or fewer that is the mean of nothing."""
    layers = len(models.EMULATED_MODEL.layers)
    shortest = next(n for n in range(1, 20) if (n - 1) * layers > 10)
    assert mini(debug_mode="breakdown", workload=Workload(gen_len=shortest))
    refusal(mini, debug_mode="breakdown", workload=Workload(gen_len=shortest - 1))


@pytest.mark.parametrize("name", ["OPT-1.3B", "facebook/opt-1.3b", "opt-1.3b-np", " opt-1.3b "])
def test_one_model_has_one_name_and_one_key(name):
    assert mini(model=name).model == "opt-1.3b" and mini(model=name).key == mini(model="opt-1.3b").key


# ---- what goes out, and comes back


@pytest.fixture(scope="module")
def flexgen_parser():
    parser = argparse.ArgumentParser()
    patches.import_flexgen().add_parser_arguments(parser)
    return parser


@given(settings=all_settings())
def test_flexgens_own_parser_reads_the_settings_back(flexgen_parser, settings):
    command = settings.flexgen_arguments("/some/weights", "/some/folder")
    assert command[:3] == ["python", "-m", "flexgen.flex_opt"]
    read = flexgen_parser.parse_args(command[3:])
    work = settings.workload
    assert models.resolve(read.model) == settings.opt_model
    assert (read.path, read.offload_dir) == ("/some/weights", "/some/folder")
    assert tuple(read.percent) == settings.split.percent
    assert (read.gpu_batch_size, read.num_gpu_batches) == (work.gpu_batch_size, work.num_gpu_batches)
    assert (read.prompt_len, read.gen_len, read.cut_gen_len) == (work.prompt_len, work.gen_len, None)
    for name in (
        "compress_weight",
        "compress_cache",
        "overlap",
        "pin_weight",
        "cpu_cache_compute",
        "attn_sparsity",
        "debug_mode",
    ):
        assert getattr(read, name) == getattr(settings, name), name
    assert read.sep_layer is True


@given(settings=all_settings())
def test_a_shell_reads_the_command_as_the_same_words_in_the_users_home(settings):
    command = settings.flexgen_command
    assert shlex.split(command, comments=True) == settings.flexgen_arguments()
    assert " ~/opt_weights " in command and " ~/flexgen_offload_dir " in command  # in quotes no shell would expand it
    assert ("exists in this lab only" in command) == (settings.opt_model in models.SYNTHETIC_MODELS)


def test_a_model_folders_command_says_flexgen_lacks_it(tmp_path):
    folder = tmp_path / "my model"
    save_config(folder)
    command = mini(model=str(folder)).flexgen_command
    assert shlex.split(command, comments=False)  # an apostrophe in a comment opens a quotation where there are none
    assert "--model facebook/my-model " in command and "# my-model exists in this lab only" in command


@pytest.mark.parametrize(
    "options, flags",
    [
        ({"page_cache": "cold"}, "--page-cache cold"),
        ({"copy_buffer": "fit"}, "--copy-buffer fit"),
        ({"page_cache": "cold", "disk_reader": "direct"}, "--page-cache cold --disk-reader direct"),
    ],
)
def test_a_command_lists_the_options_flexgen_lacks(options, flags):
    command = mini("0 0 100 0 100 0", model="opt-1.3b", device="cuda", **options).flexgen_command
    assert command.endswith(f"  # run with {flags}, which python -m helpers measure has and FlexGen does not")
    assert "#" not in mini(model="opt-1.3b", device="cuda").flexgen_command
    assert "# run with --device emulated, which" in mini(model="opt-1.3b").flexgen_command


@given(all_settings())
def test_settings_survive_json(settings):
    again = RunSettings.model_validate_json(settings.model_dump_json())
    assert again == settings and again.key == settings.key and hash(again) == hash(settings)


@given(all_settings(), all_settings())
def test_equal_settings_have_equal_keys_and_others_do_not(one, other):
    assert (one.key == other.key) == (one == other)


@given(all_settings())
def test_settings_cannot_be_changed(settings):
    with pytest.raises(ValidationError):
        settings.repeats = 7
