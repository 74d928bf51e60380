"""The chaos run's plan, its account and its verdict, on facts that are made up: nothing is killed here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from asyncworker.ledger import Outcome, Row

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_the_same_seed_has_the_same_faults_and_another_seed_has_others(load: Load) -> None:
    plan = load("_chaos_plan").plan
    assert plan(7, 120) == plan(7, 120)
    assert plan(7, 120) != plan(8, 120)
    assert plan(7, 900)[:20] == plan(7, 120)[:20]


def test_faults_come_in_order_and_are_over_before_the_load_is(load: Load) -> None:
    faults = load("_chaos_plan").plan(3, 60)
    times = [fault.at_s for fault in faults]
    assert times == sorted(times)
    assert times[0] > 0
    assert max(fault.at_s + fault.for_s for fault in faults) < 60


def test_fifteen_minutes_have_every_fault_many_times(load: Load) -> None:
    module = load("_chaos_plan")
    whats = [fault.what for fault in module.plan(1, 900)]
    assert {"kill worker", "kill driver", "kill browser", "kill page", "kill store", "freeze store"} <= set(whats)
    assert min(whats.count(what) for what in set(whats)) >= 10


def loss(worker: str = "host:7", opened_ms: int = 100_000, closed_ms: int = 130_000) -> Row:
    return Row("m", 1, "visits.visit", 1, worker, opened_ms, closed_ms, Outcome.lost)


def done(load: Load, deed: str, *, pid: int, unix_ms: int = 110_000, for_s: float = 0.0, target: str = "worker") -> Any:
    plan = load("_chaos_plan")
    fault = plan.Fault(1.0, plan.Deed(deed), plan.Target(target), 0, for_s)
    return load("_chaos_faults").Done(fault, 50.0, unix_ms, pid, pid, 50.0 + for_s if for_s else None)


@pytest.mark.parametrize(
    ("deed", "facts", "false"),
    [
        ("kill", {"pid": 7}, 0),
        ("kill", {"pid": 8}, 1),
        ("kill", {"pid": 7, "target": "browser"}, 1),
        ("kill", {"pid": 7, "unix_ms": 140_000}, 1),
        ("freeze", {"pid": 7, "for_s": 8.0}, 0),
        ("freeze", {"pid": 7, "for_s": 1.0}, 1),
    ],
)
def test_a_loss_is_true_only_if_its_own_worker_was_killed_or_frozen_for_long(
    deed: str, facts: dict[str, Any], false: int, load: Load
) -> None:
    module = load("_chaos_account")
    found = module.Account()
    module._note_loss(found, loss(), [done(load, deed, **facts)])
    assert (found.lost, found.false_losses) == (1, false)
    assert len(found.broken) == false


@pytest.mark.parametrize(("killed_ms", "false"), [(108_000, 0), (60_000, 1)])
def test_a_loss_without_a_row_is_explained_by_a_fault_not_long_before_it_was_found(
    killed_ms: int, false: int, load: Load
) -> None:
    module = load("_chaos_account")
    found = module.Account()
    row = loss(worker="", opened_ms=120_000, closed_ms=120_000)
    module._note_loss(found, row, [done(load, "kill", pid=7, unix_ms=killed_ms)])
    assert found.false_losses == false


def facts(load: Load, **changed: Any) -> Any:
    account = load("_chaos_account").Account(succeeded={"a", "b"})
    whole: dict[str, Any] = {
        "seed": 1,
        "seconds": 60.0,
        "sent": load("_chaos_load").Sent({"a": 1, "b": 2}),
        "account": account,
        "journal": [],
        "outlived": [],
        "quarters": [300.0, 300.0, 300.0, 310.0],
        "peak_mb": 400.0,
        "allowed_mb": 2_000.0,
        "left": [],
        "drain_s": 1.0,
        "slots": 4,
        "slots_at_start": 4,
        "slots_at_end": 4,
        "slots_in_use": (4, 0),
        "exit_code": 0,
        "ours_ms": [300.0, 400.0],
        "raw_ms": [310.0],
        "disturbed": 0,
    }
    return load("_chaos_verdict").Facts(**(whole | changed))


def test_a_run_that_kept_every_promise_is_ok(load: Load) -> None:
    assert load("_chaos_verdict").judge(facts(load)).ok
    assert load("_chaos_verdict").judge(facts(load, ours_ms=[300.0, 1_200.0], raw_ms=[1_000.0])).ok


def test_each_promise_that_was_broken_is_named(load: Load) -> None:
    verdict, watch, accounts = load("_chaos_verdict"), load("_chaos_watch"), load("_chaos_account")
    outlived = watch.Outlived(7, 10.0, 16.0, {"browser 12"})
    cases: list[tuple[str, dict[str, Any]]] = [
        ("messages without an outcome", {"account": accounts.Account(succeeded={"a"}, missing=1)}),
        ("messages with two outcomes", {"account": accounts.Account(succeeded={"a"}, both=1)}),
        (
            "messages that succeeded without exactly one effect",
            {"account": accounts.Account(succeeded={"a"}, wrong_effects=1)},
        ),
        ("attempts that were lost without a cause", {"account": accounts.Account(succeeded={"a"}, false_losses=1)}),
        ("s that a process outlived its owner", {"outlived": [outlived]}),
        ("processes left at the end", {"left": ["browser 9"]}),
        ("slots that serve at the end", {"slots_at_end": 3}),
        ("slots at the end by the ledger", {"slots_in_use": (2, 0)}),
        ("slots in use at the end by the ledger", {"slots_in_use": (4, 1)}),
        ("memory of the last quarter / the first", {"quarters": [300.0, 300.0, 400.0, 500.0], "seconds": 900.0}),
        ("MB of memory at most", {"peak_mb": 2_400.0, "seconds": 60.0}),
        ("ms until a killed browser serves again, p95", {"ours_ms": [300.0, 1_200.0]}),
        ("ms until a killed browser serves again, p95", {"ours_ms": [300.0, 300.0, 2_200.0], "raw_ms": [1_700.0]}),
        (
            "ms until a killed browser serves again, median",
            {"ours_ms": [1_100.0, 1_200.0, 1_200.0], "raw_ms": [300.0, 300.0, 1_700.0]},
        ),
        ("rows of attempts left open", {"account": accounts.Account(succeeded={"a"}, left_open=1)}),
        ("exit code of `asyncworker up`", {"exit_code": 3}),
    ]
    for name, changed in cases:
        report = verdict.judge(facts(load, **changed))
        assert [check.name for check in report.checks if not check.ok] == [name]
    assert any("browser 12" in each for each in verdict.judge(facts(load, outlived=[outlived])).figures["broken"])


def test_on_a_busy_machine_the_time_of_a_killed_browser_is_shown_and_decides_nothing(load: Load) -> None:
    report = load("_chaos_verdict").judge(facts(load, ours_ms=[2_000.0], busy=True))
    assert report.ok
    assert "2000 ms" in report.figures["promises"]["browser back, ours"]


def test_a_kill_that_met_another_fault_tells_no_time(load: Load, tmp_path: Path) -> None:
    accounts = load("_chaos_account")
    (tmp_path / "pages").write_text("7 49.9 50.01\n7 50.2 50.4\n")
    kill = done(load, "kill", pid=70, target="browser")
    kill.worker = 7
    assert accounts.recoveries_ms(tmp_path, [kill]) == ([pytest.approx(400.0)], 0)
    other = done(load, "kill", pid=1, target="store")
    assert accounts.recoveries_ms(tmp_path, [kill, other]) == ([], 1)
    other.at = 49.0
    assert accounts.recoveries_ms(tmp_path, [kill, other]) == ([], 1)
    other.at = 49.85
    assert accounts.recoveries_ms(tmp_path, [kill, other]) == ([], 1), "this worker had done no page since"
    (tmp_path / "pages").write_text("7 49.88 49.95\n7 49.9 50.01\n7 50.2 50.4\n")
    assert accounts.recoveries_ms(tmp_path, [kill, other]) == ([pytest.approx(400.0)], 0)
