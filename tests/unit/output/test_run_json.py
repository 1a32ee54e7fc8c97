"""run.json: which record answers for a folder, and that no run loses what an earlier one said."""

import json
from pathlib import Path

import pytest

from extractor.errors import RunError, UsageError
from extractor.output import run_json
from extractor.output.run_json import MOST_EARLIER, RUN, Run, RunModel
from extractor.run import provenance

MODEL = RunModel(path="/models/tiny", num_layers=6, hidden_size=32)
EARLY, LATE = "2026-11-29T08:00:00+0000", "2026-11-30T08:00:00+0000"


def record(**values: object) -> Run:
    same = {"fingerprint": "f", "layers": ("1", "final"), "dtype": "bfloat16", "model": MODEL}
    return Run(**{**same, **values})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "files, wanted",
    [
        ({"run.json": EARLY, "run-0-of-4.json": LATE}, "run-0-of-4.json"),
        ({"run.json": LATE, "run-0-of-4.json": EARLY}, "run.json"),
        ({"run-0-of-2.json": LATE, "run-0-of-4.json": EARLY}, "run-0-of-2.json"),
        ({"run-0-of-2.json": EARLY, "run-3-of-4.json": LATE}, "run-3-of-4.json"),
        ({"run.json": LATE, "run-0-of-4.json": LATE}, "run.json"),
        ({"run.json": None, "run-0-of-4.json": None}, "run.json"),
        ({"run.json": None, "run-0-of-4.json": EARLY}, "run-0-of-4.json"),
        # The same instant, said in two time zones, and a day that is only later as text.
        ({"run-0-of-2.json": "2026-11-30T10:00:00+0300", "run.json": LATE}, "run.json"),
    ],
)
def test_the_run_that_started_last_answers(
    tmp_path: Path, files: dict[str, str | None], wanted: str
) -> None:
    for name, started in files.items():
        run_json.write(tmp_path / name, record(started=started, parts={"file": name}))
    assert run_json.find(tmp_path).parts == {"file": wanted}


def test_a_run_without_a_fingerprint_or_of_another_name_never_answers(tmp_path: Path) -> None:
    run_json.write(tmp_path / RUN, record(fingerprint="", started=LATE))
    run_json.write(tmp_path / "run-old.json", record(started=LATE))
    with pytest.raises(UsageError, match="stopped before it had anything"):
        run_json.find(tmp_path)
    run_json.write(tmp_path / "run-1-of-2.json", record(started=EARLY, status="complete"))
    assert run_json.find(tmp_path).status == "complete"


def test_a_record_that_is_damaged_might_be_the_one(tmp_path: Path) -> None:
    run_json.write(tmp_path / RUN, record(started=LATE))
    (tmp_path / "run-0-of-4.json").write_text('{"fingerprint": "f", "layers": [1]}')
    with pytest.raises(UsageError, match=r"run-0-of-4\.json: is not a run\.json"):
        run_json.find(tmp_path)


@pytest.mark.parametrize(
    "key, value",
    [
        ("layers", ["../../x"]),
        ("dtype", "int4"),
        ("schema", 2),
        ("prepared", "/etc"),
        ("prepared", "prepared/.."),
        ("model", {"num_layers": 10**30}),
        ("model", {"hidden_size": -1}),
        ("replicas", [{"timeline": "x"}]),
        ("earlier", [{"replicas": [{"seconds": "x"}]}]),
        ("stages", {"load": "soon"}),
    ],
)
def test_values_that_no_run_writes(tmp_path: Path, key: str, value: object) -> None:
    whole = run_json.as_json(record())
    (tmp_path / RUN).write_text(json.dumps({**whole, key: value}))
    with pytest.raises(UsageError, match=r"run\.json: is not a run\.json of this program"):
        run_json.find(tmp_path)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Also half a surrogate pair, as in the name of a file that is not UTF-8, and NaN."""
    engine = {"note": "\udcff", "moved": float("inf")}
    run = record(
        engine=engine, argv=("extract", "\udce9"), stages={"load": 1.5}, counts={"rows": 3}
    )
    run_json.write(tmp_path / RUN, run)
    assert run_json.read(tmp_path / RUN) == run


def test_a_run_keeps_what_the_runs_before_it_said() -> None:
    points = [[1.0, 2, 3, 0.0, 0.0, 0.0]]
    first = record(run_id="a", status="stopped", started=EARLY, versions={"torch": "1"})
    first = run_json.replace(first, replicas=({"seconds": 9.0, "tokens": 5, "timeline": points},))
    second = record(run_id="b", status="failed", error="disk").after(first)
    third = record(run_id="c", status="complete").after(second)
    assert third.earlier is not None
    assert [(r["run_id"], r["status"]) for r in third.earlier] == [
        ("a", "stopped"),
        ("b", "failed"),
    ]
    assert third.earlier[0]["versions"] == {"torch": "1"} and third.earlier[1]["error"] == "disk"
    assert third.last_work[0].tokens == 5 and third.last_work[0].timeline, "the last that wrote"
    assert third.after(third) is third, "a run does not come before itself"
    fourth = record(run_id="d").after(run_json.replace(third, replicas=({"tokens": 7},)))
    assert fourth.earlier is not None and len(fourth.earlier) == 3
    assert "timeline" not in fourth.earlier[0]["replicas"][0], "one timeline is kept, the last"
    assert fourth.last_work[0].tokens == 7


def test_the_first_and_the_latest_are_kept_of_many(tmp_path: Path) -> None:
    run = record(run_id="0")
    for number in range(1, 3 * MOST_EARLIER):
        run = record(run_id=str(number)).after(run)
    run_json.write(tmp_path / RUN, run)
    read = run_json.read(tmp_path / RUN)
    assert read is not None and read.earlier is not None and len(read.earlier) == MOST_EARLIER
    assert [read.earlier[i]["run_id"] for i in (0, 1, -1)] == ["0", "100", "148"]
    assert read.earlier_dropped == 3 * MOST_EARLIER - 1 - MOST_EARLIER


def test_the_last_word_of_a_run_leaves_the_record_before_it(tmp_path: Path) -> None:
    path = tmp_path / RUN
    run_json.write(path, record(run_id="before", status="complete", counts={"written": 5}))
    provenance.mark_end(path, "stopped", "")
    provenance.mark_end(path, "failed", "a rank died")  # of the same process: no second record
    run = run_json.find(tmp_path)
    assert (run.status, run.error, run.fingerprint, run.counts) == (
        "failed",
        "a rank died",
        "f",
        None,
    )
    assert run.earlier is not None and len(run.earlier) == 1
    assert run.earlier[0]["status"] == "complete" and run.earlier[0]["counts"] == {"written": 5}


def test_a_run_that_stops_first_leaves_a_record_for_the_scheduler(tmp_path: Path) -> None:
    provenance.mark_end(tmp_path / RUN, "failed", "no model")
    assert not (tmp_path / RUN).exists()
    provenance.mark_end(tmp_path / RUN, "stopped", "")
    assert '\n "status": "stopped"' in (tmp_path / RUN).read_text(), "launch/job.sh reads this line"
    assert run_json.newest(tmp_path) is None


def test_a_link_is_not_read(tmp_path: Path) -> None:
    run_json.write(tmp_path / "elsewhere.json", record())
    (tmp_path / RUN).symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(RunError, match="is a link"):
        run_json.find(tmp_path)
    assert run_json.find(tmp_path, follow=True).fingerprint == "f"
