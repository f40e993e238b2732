"""Which runs a question shows, and why it leaves the others out."""

from __future__ import annotations

from hypothesis import given, strategies as st

from factories import T4, WORK, make_record
from helpers.analysis import matching
from helpers.analysis.matching import homework_rows
from helpers.homework import DISK, GPU, QUESTIONS
from helpers.models import OptModel
from helpers.placement import place
from helpers.runs import from_record
from test_runs import of_folder


def run(percent=DISK, batch=4, name="mine", **settings):
    work = WORK.model_copy(update={"gpu_batch_size": batch} | settings.pop("workload", {}))
    return from_record(name, make_record(percent, settings={"workload": work, **settings}))


def labels(rows, question):
    return [row.label for row in rows.question(question)]


def test_rows_are_matched_by_settings_not_by_name():
    renamed = [r.model_copy(update={"run_id": f"mine {i}"}) for i, r in enumerate(T4)]
    rows, original = homework_rows(reversed(renamed)), homework_rows(T4)
    assert {k: r.total_throughput_tok_s for k, r in rows.by_id.items()} == {
        k: r.total_throughput_tok_s for k, r in original.by_id.items()
    }
    assert set(rows.by_id) == {r.id for question in QUESTIONS.values() for r in question} - {"q4-disk-cold"}
    assert not rows.left_out


def test_another_split_takes_its_place_by_gpu_then_cpu_share():
    rows = homework_rows([run("20 80 100 0 100 0"), run(DISK), run("0 100 100 0 100 0"), run(GPU)])
    assert labels(rows, "q1") == ["(1)", "20/80/0", "0/100/0", "(5)"]
    assert [row.in_homework for row in rows.question("q1")] == [True, False, False, True]


def test_other_batches_join_question_2_in_order():
    rows = homework_rows([run(batch=batch) for batch in (32, 4, 1, 2)] + [run(GPU)])
    assert labels(rows, "q2") == ["1", "2", "4", "32"] and labels(rows, "q1") == ["(1)", "(5)"]


def test_another_scenario_joins_question_3():
    percent = "0 100 100 0 100 0"
    rows = homework_rows([run(GPU), run(percent), run(percent, compress_weight=True), run("50 50 100 0 100 0")])
    assert labels(rows, "q3") == ["(α)", "0/100/0", "0/100/0"]
    assert [row.run.compress_weight for row in rows.question("q3")] == [False, False, True]


def test_a_sweep_at_another_batch_is_the_sweep():
    rows = homework_rows([run(row.percent, batch=8) for row in QUESTIONS["q1"]] + [run(batch=4)])
    assert labels(rows, "q1") == ["(1)", "(2)", "(3)", "(4)", "(5)"] and labels(rows, "q2") == ["4", "8"]


def test_runs_left_out_are_named_with_the_reason():
    rows = homework_rows(
        [
            run(GPU),
            run("50 50 100 0 100 0"),
            run(DISK),
            run(DISK, workload={"prompt_len": 99}),
            run("50 50 100 0 100 0", batch=16),
            run("100 0 0 100 100 0"),
            run(DISK, debug_mode="fewer_batch"),
        ]
    )
    reasons = " ".join(rows.left_out)
    assert len(rows.left_out) == 4
    for reason in ("prompt 99", "batch 16 instead of 4", "KV cache or activations", "fewer_batch"):
        assert reason in reasons


def test_the_fullest_campaign_is_taken():
    rows = homework_rows([from_record("x", make_record()), *T4])
    assert rows.first.model == "opt-1.3b" and any("opt-mini" in line for line in rows.left_out)


def test_cold_and_natural_runs_are_kept_apart():
    natural, cold = run(), run(page_cache="cold")
    rows = homework_rows([cold, natural])
    assert rows.by_id["q1-5"] == natural and rows.by_id["q4-disk-cold"] == cold
    assert homework_rows([cold]).by_id["q1-5"] == cold


def test_runs_that_read_no_disk_join_a_cold_campaign():
    """The page cache makes no difference to them."""
    cold = [run(row.percent, page_cache="cold") for row in QUESTIONS["q1"][2:]]
    assert labels(homework_rows([*cold, run(GPU)]), "q1") == ["(1)", "(3)", "(4)", "(5)"]


def test_two_models_in_one_folder_are_two_campaigns():
    """The later one is twice as wide, and each run is placed by the shape it ran with."""
    shapes = [OptModel("opt-mine", 2, width, 4, 1024) for width in (128, 256)]
    splits = (("50 50 100 0 100 0", shapes[0]), ("50 0 100 0 100 0", shapes[1]), ("0 50 100 0 100 0", shapes[1]))
    records = [of_folder(make_record(percent=percent), "/models/mine", shape) for percent, shape in splits]
    measured = [from_record(str(n), record) for n, record in enumerate(records)]
    rows = homework_rows(measured)
    assert set(rows.by_id) == {"q1-3", "q1-4"} and "2 layers of width 128" in rows.left_out[0]
    assert [r.placement.total_bytes for r in measured] == [
        place(shape, 50, 50, False).total_bytes for _, shape in splits
    ]


def test_runs_with_other_options_are_another_campaign():
    (line,) = homework_rows([run(), run(GPU), run(overlap=False)]).left_out
    assert "--overlap false" in line


def test_of_equal_settings_the_last_done_run_counts():
    first, second = (from_record("a", make_record(latencies=((s,),))) for s in (4.0, 2.0))
    failed = first.model_copy(update={"status": "failed", "reason": "oom"})
    rows = homework_rows([first, second, failed])
    assert rows.done("q1-5") == second and len(rows.left_out) == 2


def test_the_direct_reader_has_a_section_of_its_own():
    direct = run(page_cache="cold", disk_reader="direct")
    rows = homework_rows([run(), direct])
    assert rows.extras == {"q4-disk-direct": direct} and not rows.left_out
    assert not homework_rows([run(disk_reader="direct")]).by_id


def test_a_run_says_what_disturbed_it():
    noted = run().model_copy(update={"notes": ("the CPU core slowed down to 52, 47 % of its speed (each repeat)",)})
    (row,) = homework_rows([noted]).question("q1")
    assert "47 %" in row.disturbance
    (row,) = homework_rows([run()]).question("q1")
    assert not row.disturbance


everything = [
    run(percent, batch, compress_weight=compress, name=f"{percent} {batch} {compress}")
    for percent in (GPU, "20 80 100 0 100 0", "100 0 0 100 100 0", DISK)
    for batch in (1, 4)
    for compress in (False, True)
]


@given(st.lists(st.sampled_from(everything), unique_by=id))
def test_every_run_is_shown_or_left_out_with_a_reason(runs):
    rows = homework_rows(runs)
    left_out = [r for r in runs if not any(r is shown for shown in rows.runs)]
    assert bool(left_out) == bool(rows.left_out) or not rows.runs
    for question in QUESTIONS:
        ids = [(row.id, row.run.compress_weight) for row in rows.question(question)]
        assert len(ids) == len(set(ids))
    assert len(matching.names(runs)) == len(runs)
