"""The benchmarks' verdicts, on figures that are made up: nothing is measured here."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from rich.table import Table

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("[!_]*.py"))

Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return _load


def _load(name: str) -> ModuleType:
    if name != "celery":
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location("celery_benchmark", BENCHMARKS / "celery.py")  # no one's `celery`
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["celery_benchmark"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_required_benchmarks_are_there() -> None:
    needed = {"broker", "celery", "chaos", "ledger", "loop_lag", "overhead", "pacing", "recycling", "startup"}
    assert needed <= set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_answers_help_with_the_flags_that_all_have(script: str) -> None:
    answer = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{script}.py"), "--help"], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert "--json" in answer.stdout
    assert "--quick" in answer.stdout


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(("value", "code"), [(1.0, 0), (0.5, 1)])
def test_every_scripts_json_is_one_object_whose_ok_is_the_exit_code(
    script: str,
    value: float,
    code: int,
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    harness, module = load("_harness"), load(script)
    report = harness.Report([harness.Check("speed", value, ">=", 1.0)], {"figure": 7}, Table())
    monkeypatch.setattr(module, "measure", lambda options: report)
    assert module.run(["--json"]) == code
    printed = json.loads(capsys.readouterr().out)
    assert printed["ok"] is (code == 0)
    assert printed["figure"] == 7
    assert {"cores", "load_before", "load_after"} <= printed["machine"].keys()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_measurement_that_fails_is_not_ok_and_says_why(
    script: str, load: Load, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("the browser is not there")

    module = load(script)
    monkeypatch.setattr(module, "measure", fail)
    assert module.run(["--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["ok"] is False
    assert "the browser is not there" in printed["error"]


def test_a_report_without_a_required_figure_is_not_ok(load: Load) -> None:
    assert not load("_harness").Report([], {}, Table()).ok


def rotation(
    load: Load, *, ours: float, raw: float = 10.0, plain: float = 10.0, per_message: float = 5.0, **facts: Any
) -> Any:
    """One rotation at these jobs per second."""
    rates = {"raw": raw, "ours": ours, "plain": plain, "per_message": per_message}
    return {name: load("_stage").Round(100, 100 / rate, pickup_ms=50.0, **facts) for name, rate in rates.items()}


def test_overhead_at_the_required_ratios_is_ok(load: Load) -> None:
    report = load("overhead").judge([rotation(load, raw=10.0, ours=9.51, plain=9.7, per_message=5.94)] * 3)
    assert report.ok
    assert report.as_json()["ratios"]["ours/raw"]["median"] == pytest.approx(0.951)


@pytest.mark.parametrize(
    ("rates", "failing"),
    [
        ({"ours": 9.4, "plain": 9.0}, "ours / raw limit"),
        ({"ours": 9.7, "plain": 10.0}, "ours / plain Dramatiq"),
        ({"ours": 10.0, "per_message": 6.5}, "ours / browser per message"),
    ],
)
def test_overhead_names_the_ratio_that_is_too_low(rates: dict[str, float], failing: str, load: Load) -> None:
    report = load("overhead").judge([rotation(load, **rates)] * 3)
    assert not report.ok
    assert [check.name for check in report.checks if not check.ok] == [failing]


def test_overhead_shows_the_standard_error_of_a_ratio_and_does_not_let_it_excuse_one(load: Load) -> None:
    report = load("overhead").judge([rotation(load, ours=ours, plain=9.0) for ours in (9.2, 9.4, 9.9)])
    check = report.as_json()["checks"][0]
    assert check["value"] + check["standard_error"] > check["limit"]
    assert check["ok"] is False
    assert not report.ok


def test_overhead_compares_within_a_rotation_so_that_a_slow_minute_slows_both(load: Load) -> None:
    slow = rotation(load, raw=5.0, ours=5.0, plain=5.0, per_message=2.5)
    report = load("overhead").judge([rotation(load, ours=10.0), slow, slow])
    assert report.as_json()["ratios"]["ours/raw"] == {"median": 1.0, "min": 1.0, "max": 1.0}


def test_overhead_leaves_out_rotations_in_which_others_used_the_machine(load: Load) -> None:
    disturbed = rotation(load, ours=1.0, foreign=0.5)
    report = load("overhead").judge([rotation(load, ours=10.0)] * 3 + [disturbed] * 4)
    assert report.ok
    assert report.as_json()["quiet"] is True
    assert (report.as_json()["rotations"], report.as_json()["rotations_measured"]) == (3, 7)


def test_overhead_counts_all_rotations_and_says_so_when_too_few_were_quiet(load: Load) -> None:
    report = load("overhead").judge([rotation(load, ours=10.0)] * 2 + [rotation(load, ours=1.0, foreign=0.5)] * 4)
    assert not report.ok
    assert report.as_json()["quiet"] is False
    assert report.as_json()["rotations"] == 6


def test_overhead_without_a_rotation_is_an_error(load: Load) -> None:
    with pytest.raises(ValueError, match="no rotation"):
        load("overhead").judge([])


def test_every_variant_comes_first_and_last_and_works_once_in_each_rotation(load: Load) -> None:
    overhead = load("overhead")
    orders = [overhead._order(number) for number in range(8)]
    assert all(sorted(order) == sorted(overhead.VARIANTS) for order in orders)
    assert {order[0] for order in orders} == {order[-1] for order in orders} == set(overhead.VARIANTS)


def starts(load: Load, *, worker_ms: float = 900.0, wall_ms: float = 300.0, heavy: tuple[str, ...] = ()) -> Any:
    startup = load("startup")
    imports = [startup.Import(wall_ms, wall_ms - 20, 50.0, heavy)] * 3
    return startup.Starts(2_000.0, dict.fromkeys(startup.ENGINES, [worker_ms] * 3), imports)


def test_startup_below_its_limits_is_ok(load: Load) -> None:
    assert load("startup").judge(starts(load)).ok


@pytest.mark.parametrize("slow", [{"worker_ms": 1_600.0}, {"wall_ms": 410.0}, {"heavy": ("playwright",)}])
def test_startup_fails_for_a_slow_worker_a_slow_import_and_a_browser_library(slow: dict[str, Any], load: Load) -> None:
    assert not load("startup").judge(starts(load, **slow)).ok


def lags(load: Load, *rounds: tuple[float, float]) -> Any:
    """Rounds of one scenario, each with our lag and the control's."""
    loop_lag = load("loop_lag")
    ours = [loop_lag.Round(100.0, lag_ms, control_ms) for lag_ms, control_ms in rounds]
    return loop_lag.judge({"close": loop_lag.Measured(ours)})


@pytest.mark.parametrize("lag_and_control", [(49.0, 1.0), (140.0, 50.0)])
def test_loop_lag_below_its_limit_or_explained_by_the_machine_is_ok(
    lag_and_control: tuple[float, float], load: Load
) -> None:
    assert lags(load, lag_and_control).ok


@pytest.mark.parametrize("lag_and_control", [(51.0, 1.0), (160.0, 50.0)])
def test_loop_lag_fails_for_a_blocked_loop(lag_and_control: tuple[float, float], load: Load) -> None:
    assert not lags(load, lag_and_control).ok


def test_loop_lag_takes_the_median_round_and_shows_the_worst(load: Load) -> None:
    report = lags(load, (400.0, 1.0), (10.0, 1.0), (20.0, 1.0))
    assert report.ok
    assert report.as_json()["engine"] == "stand-in"
    assert report.as_json()["scenarios"]["close"] == {
        "rounds": 3,
        "duration_ms": 100.0,
        "lag_ms": 20.0,
        "worst_lag_ms": 400.0,
        "control_lag_ms": 1.0,
        "plain_lag_ms": None,
        "plain_duration_ms": None,
    }
    assert not lags(load, (400.0, 1.0), (300.0, 1.0), (20.0, 1.0)).ok


def test_loop_lag_measures_what_blocks_the_loop_and_not_the_thread_beside_it(load: Load) -> None:
    async def block() -> None:
        time.sleep(0.2)

    measured = [asyncio.run(load("_lag").measured(block)) for _ in range(5)]
    assert all(figures["lag_ms"] >= 150 for figures in measured)
    assert any(figures["control_ms"] < figures["lag_ms"] for figures in measured), "a busy machine holds up both"


def test_a_run_leaves_no_process_and_no_file_when_it_fails(load: Load) -> None:
    """Not even a process that has left its parent and its session, and waits for nothing."""
    waiting = "import signal; signal.pause()"
    leaving = (
        "import subprocess, sys; "
        f"print(subprocess.Popen([sys.executable, '-c', {waiting!r}], start_new_session=True).pid, flush=True)"
    )
    seen: list[Any] = []

    def fail_half_way() -> None:
        with load("_workshop").workshop() as place:
            child = place.start("child", sys.executable, "-c", leaving, pipes=True)
            seen.extend([place.folder, psutil.Process(int(child.answer()))])
            assert seen[0].is_dir()
            assert seen[1].is_running()
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail_half_way()
    folder, left = seen
    psutil.wait_procs([left], timeout=10)
    assert not folder.exists()
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE


def found(load: Load, *, turns: list[dict[str, Any]], **facts: Any) -> Any:
    """What broker.py finds; a turn is a system's (drain/s, enqueue/s) or its pick-ups in ms."""
    trials = load("_broker_trials")
    rotations = [
        {
            name: trials.Turn(tuple(of), None, None) if isinstance(of, list) else trials.Turn((), *of)
            for name, of in one.items()
        }
        for one in turns
    ]
    rest = {"idle": {}, "memory": {}, "recovery": {}} | facts
    versions = {name: f"{name} 1" for one in turns for name in one} | dict.fromkeys(rest["recovery"], "1")
    return load("_broker_figures").Found(versions, {}, rotations, trials.Quiet(**rest))


def verdicts(report: Any) -> dict[str, bool]:
    return {check.name: check.ok for check in report.checks}


def test_broker_compares_within_a_rotation_so_that_a_slow_minute_slows_both(load: Load) -> None:
    turns = [{"plain": (1_000, 3_000), "ours": (1_600, 2_800)}, {"plain": (100, 300), "ours": (160, 280)}]
    report = load("_broker_figures").judge(found(load, turns=turns))
    assert report.as_json()["systems"]["ours"]["drain_per_s_of_plain"] == {"median": 1.6, "min": 1.6, "max": 1.6}
    assert verdicts(report) == {"drain: ours / plain Dramatiq": True, "enqueue: ours / plain Dramatiq": True}


def test_broker_shows_what_is_missed_and_does_not_fail_by_it(load: Load) -> None:
    report = load("_broker_figures").judge(
        found(
            load,
            turns=[{"plain": (1_000, 3_000), "ours": (1_490, 2_690)}],
            idle={"ours": 0.5},
            recovery={"ours": load("_broker_trials").Recovered(17.1, 60.0)},
        )
    )
    assert set(verdicts(report).values()) == {False}
    assert len(verdicts(report)) == 4
    assert report.ok


def test_broker_holds_ours_against_the_rival_that_drains_fastest_beside_it(load: Load) -> None:
    turns = [
        {"ours": (2_000, 1), "arq": (200, 1), "saq": (1_900, 1), "celery": (700, 1)},
        {"ours": (2_000, 1), "arq": (200, 1), "saq": (2_500, 1), "celery": (700, 1)},
        {"ours": (2_000, 1), "arq": (200, 1), "saq": (2_100, 1), "celery": (700, 1)},
    ]
    (check,) = load("_broker_figures").judge(found(load, turns=turns)).checks
    assert check.name == "drain: ours / fastest other (saq)"
    assert check.value == pytest.approx(2_000 / 2_100)
    assert not check.ok


def test_broker_takes_percentiles_of_all_rotations_together(load: Load) -> None:
    pickups = [float(number) for number in range(1, 101)]
    report = load("_broker_figures").judge(found(load, turns=[{"ours": pickups[50:]}, {"ours": pickups[:50]}]))
    assert report.as_json()["systems"]["ours"]["pickup_ms"] == {
        "p50": 50.0,
        "p95": 95.0,
        "messages": 100,
        "p50_by_rotation": [75.0, 25.0],
    }


@pytest.mark.parametrize(("values", "percent", "expected"), [([7.0], 95, 7.0), ([3.0, 1.0, 2.0], 50, 2.0)])
def test_a_percentile_is_one_of_the_values(values: list[float], percent: float, expected: float, load: Load) -> None:
    assert load("_broker_figures").percentile(values, percent) == expected


def test_broker_says_that_a_recovery_was_given_up_and_counts_it_as_missed(load: Load) -> None:
    figures, trials = load("_broker_figures"), load("_broker_trials")
    given_up = trials.Recovered(None, 60.0)
    report = figures.judge(found(load, turns=[], recovery={"plain": given_up, "ours": given_up}))
    assert figures.shown(given_up) == "> 60 s"
    assert report.as_json()["systems"]["plain"]["recovery_s"] == {"longer_than": 60.0}
    assert verdicts(report) == {"recovery, s": False}
    broker = load("broker")
    assert all(plan.recovery_s > figures.RECOVERY_S for plan in (broker.FULL, broker.QUICK))


def test_a_drain_runs_from_the_first_beginning_to_the_last(load: Load) -> None:
    assert load("_broker_trials").drain_rate([3_000_000_000, 1_000_000_000, 2_000_000_000]) == pytest.approx(1.0)


def test_each_system_comes_first_in_turn(load: Load) -> None:
    order = load("_broker_trials").order
    assert [order(["a", "b", "c"], number) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


@pytest.mark.parametrize(("ran", "missing", "twice"), [([1, 2, 3], 0, 0), ([1, 3], 1, 0), ([1, 2, 2, 3], 0, 1)])
def test_a_message_that_is_lost_or_runs_twice_fails_the_measurement(
    ran: list[int], missing: int, twice: int, load: Load, tmp_path: Path
) -> None:
    systems = load("_broker_systems")
    stamps = tmp_path / "stamps"
    stamps.write_bytes(b"".join(systems.STAMP.pack(number, 10 * number) for number in [-1, *ran]))
    child = load("_workshop").Child("worker", None, tmp_path)
    worker = systems.Worker(systems.SYSTEMS["plain"], child, stamps)
    if not missing and not twice:
        assert worker.times(range(1, 4)) == {1: 10, 2: 20, 3: 30}
        return
    with pytest.raises(ValueError, match=f"of 3 messages {missing} did not run, and {twice} ran more than once"):
        worker.times(range(1, 4))


def test_a_rival_that_fails_is_a_finding_and_ours_is_an_error(load: Load) -> None:
    broker, systems = load("broker"), load("_broker_systems").SYSTEMS
    absent = broker.Absent()
    with absent.guard(systems["arq"]):
        raise RuntimeError("its worker ended")
    assert absent.why == {"arq": "failed: its worker ended"}
    assert absent.present([systems["arq"], systems["saq"]]) == [systems["saq"]]
    with pytest.raises(RuntimeError, match="ours ended"), absent.guard(systems["ours"]):
        raise RuntimeError("ours ended")


def test_a_system_that_is_not_installed_has_no_version(load: Load) -> None:
    systems = load("_broker_systems")
    nowhere = systems.System("none", "on_none", ("no-such-distribution",), (), "")
    assert systems.installed(nowhere, sys.executable) is None
    assert "dramatiq 2" in systems.installed(systems.SYSTEMS["plain"], sys.executable)


@pytest.mark.parametrize(
    "words", [["--systems", "plain,rq"], ["--only", "speed"], ["--python", "arq"], ["--python", "arq=/no/python"]]
)
def test_broker_refuses_what_it_does_not_know(words: list[str], load: Load) -> None:
    with pytest.raises(SystemExit) as ended:
        load("broker").run(words)
    assert ended.value.code == 2


@pytest.mark.parametrize(("size", "fits"), [(700.0, True), (720.0, False)])
def test_the_ledger_is_as_large_as_all_rows_that_it_keeps_by_default(load: Load, size: float, fits: bool) -> None:
    report = load("ledger").judge({"each succeeds": 300.0, "one of ten is run again": size}, 10)
    assert report.ok is fits
    assert report.as_json()["kept_rows"] == 1_500_000


def test_celery_compares_within_a_round_and_shows_what_is_missed(load: Load) -> None:
    celery = load("celery")
    fast, slow = ({"prefork": (rate, 1.0), "sync": (1.1 * rate, 0.9), "async": (0.9 * rate, 1.2)} for rate in (900, 90))
    rounds = [{name: celery.Round(*one) for name, one in each.items()} for each in (fast, slow)]
    report = celery.judge(rounds, {"prefork": [3.0], "sync": [3.3], "async": [3.9], "native": [1.5]})
    assert report.as_json()["systems"]["sync"]["drain_of_prefork"] == {"median": 1.1, "min": 1.1, "max": 1.1}
    assert list(verdicts(report).values()) == [True, True, False, False]
    assert not report.ok


def test_pacing_counts_in_every_window(load: Load) -> None:
    verdict = load("_pacing_verdict")
    times = [0.0, 0.1, 0.2, 1.0, 1.1, 2.5, 3.0]
    assert verdict.most_in(times, 1.0) == 3
    assert verdict.most_in(times, 1.01) == 4
    assert [verdict.least_in(times, window_s) for window_s in (1.0, 1.5)] == [0, 1]
    assert verdict.least_in(times, 10.0) == len(times), "no window is within the log"


def paced(load: Load, *, per_s: float = 10.0, for_s: float = 120.0) -> Any:
    verdict = load("_pacing_verdict")
    return verdict.Kept.of([number / per_s for number in range(round(for_s * per_s))], 60)


@pytest.mark.parametrize(
    ("facts", "failing"),
    [
        ({}, []),
        ({"rate": 9.9}, []),
        ({"rate": 9.8}, ["rate: fewest in 60 s"]),
        ({"rate": 10.1}, ["rate: most in 60 s"]),
        (
            {"throughput": [(100.0, 96.0), (100.0, 94.0), (200.0, 180.0)]},
            ["another host: throughput beside the paced one"],
        ),
        ({"cpu": 5.0}, ["in line: more CPU, % of a core"]),
        ({"starts": [5.0] * 19 + [51.0]}, ["in line: start of another host's, ms"]),
        ({"quiet_s": 19.9}, ["429: quiet for s"]),
        ({"others": 0}, ["429: others go on"]),
        ({"recovered": 0.9}, ["kills: of the rate, when they are over"]),
    ],
)
def test_pacing_names_the_promise_that_is_broken(facts: dict[str, Any], failing: list[str], load: Load) -> None:
    verdict = load("_pacing_verdict")
    found = verdict.Found(
        rate=paced(load, per_s=facts.get("rate", 9.95)),
        throughput=facts.get("throughput", [(100.0, 96.0)]),
        waited=verdict.Waited(10_000, (2.0, facts.get("cpu", 2.5)), (200.0, 201.0), facts.get("starts", [5.0] * 20)),
        refused=verdict.Refused(20, facts.get("quiet_s", 20.1), facts.get("others", 7)),
        killed=paced(load, per_s=9.0),
        recovered=facts.get("recovered", 1.0),
    )
    report = verdict.judge(found)
    assert [check.name for check in report.checks if not check.ok] == failing
    assert report.ok is not bool(failing)
    assert report.as_json()["found"]["refused"]["asked_s"] == 20


def test_pacing_leaves_out_of_the_quiet_what_was_on_its_way(load: Load) -> None:
    refused = load("_pacing_verdict").Refused.of(10.0, [9.0, 10.0, 10.2, 31.0], [9.0, 12.0, 29.0, 31.0], 20)
    assert (refused.quiet_s, refused.others) == (21.0, 2)
