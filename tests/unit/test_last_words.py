"""A worker process that fails at boot lingers, so that its command reads why; one that was ready does not."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from asyncworker import last_words

NOTHING: Any = None


def work(said: Connection, boots: bool) -> None:
    last_words.time = SimpleNamespace(sleep=said.send)  # type: ignore[attr-defined]  # in this child alone
    words = last_words.LastWords()
    if boots:
        words.after_worker_boot(NOTHING, NOTHING)
    else:
        raise SystemExit(2)


@pytest.mark.parametrize(("boots", "lingered"), [(False, [last_words.LINGER_S]), (True, [])])
def test_a_worker_process_lingers_only_if_it_was_never_ready(boots: bool, lingered: list[float]) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    with here:
        child = context.Process(target=work, args=(there, boots))
        child.start()
        there.close()
        child.join(30)
        assert child.exitcode == (0 if boots else 2)
        assert [here.recv() for _ in lingered] == lingered
        with pytest.raises(EOFError):
            here.recv()


def test_a_process_that_is_no_worker_does_not_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_words, "Finalize", NOTHING)
    last_words.LastWords().after_worker_boot(NOTHING, NOTHING)
