"""Sends a message, or a few, for each scenario, and prints what has become of them, as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import facts_tasks as facts
from celery import chain, chord, group
from celery.result import AsyncResult, GroupResult

Scenario = Callable[[], Any]


def _malformed() -> AsyncResult:
    with facts.app.producer_pool.acquire() as producer:
        producer.publish({"hello": "world"}, exchange="", routing_key="facts", serializer="json")
    return AsyncResult("malformed")


def _undecodable() -> AsyncResult:
    with facts.app.producer_pool.acquire() as producer:
        producer.publish(
            b"\x80\x04K\x01.",
            exchange="",
            routing_key="facts",
            content_type="application/x-python-serialize",
            content_encoding="binary",
            headers={"task": "facts.ok", "id": "undecodable", "root_id": "undecodable"},
        )
    return AsyncResult("undecodable")


def _priorities() -> GroupResult:
    """While the worker is busy, some tasks come."""
    facts.sleeper.delay(1)
    sent = [facts.order.apply_async((priority,), priority=priority) for priority in (9, 7, 3, 5, 0)]
    return GroupResult("priorities", sent)


SCENARIOS: dict[str, Scenario] = {
    "succeed": lambda: facts.ok.delay(1),
    "raise": lambda: facts.boom.delay(),
    "raise_custom_exc": lambda: facts.boom_custom.delay(),
    "raise_throws": lambda: facts.boom_throws.delay(),
    "bad_args_worker": lambda: facts.app.send_task("facts.typed", args=(1,)),
    "retry_countdown0": lambda: facts.retry_ok.delay(),
    "retry_newargs": lambda: facts.retry_newargs.delay(1, "first"),
    "retry_exc_exceed": lambda: facts.retry_exc.delay(),
    "retry_noexc_exceed": lambda: facts.retry_noexc_exceed.delay(),
    "retry_in_except_noexc": lambda: facts.retry_in_except.delay(),
    "retry_nothrow": lambda: facts.retry_nothrow.delay(),
    "autoretry": lambda: facts.autoretried.delay(),
    "ignore": lambda: facts.ign.delay(),
    "ignore_after_update_state": lambda: facts.ign_state.delay(),
    "reject_early_ack": lambda: facts.rej.delay(),
    "reject_late_ack": lambda: facts.rej_late.delay(),
    "reject_requeue": lambda: facts.rej_requeue.delay(),
    "ignore_result": lambda: facts.noresult.delay(),
    "ignore_result_failure": lambda: facts.noresult_boom.delay(),
    "apply_async_ignore_result": lambda: facts.ok.apply_async((1,), ignore_result=True),
    "track_started_progress": lambda: facts.progress.delay(),
    "unserializable_result": lambda: facts.unserializable.delay(),
    "on_success_handler_raises": lambda: facts.bad_on_success.delay(),
    "request_fields": lambda: facts.dump_request.apply_async(
        (1,), {"x": 2}, headers={"x_trace": "t"}, expires=300, priority=3, time_limit=50, soft_time_limit=40
    ),
    "request_fields_plain": lambda: facts.dump_request.delay(),
    "types": lambda: facts.types.delay(*facts.VALUES),
    "compressed": lambda: facts.ok.apply_async((1,), compression="zlib"),
    "pickle_is_not_accepted": _undecodable,
    "countdown": lambda: facts.ok.apply_async((1,), countdown=0.3),
    "eta_aware": lambda: facts.ok.apply_async((1,), eta=datetime.now(UTC) + timedelta(seconds=0.3)),
    "eta_naive_utcnow": lambda: facts.ok.apply_async((1,), eta=datetime.now(UTC).replace(tzinfo=None)),
    "eta_past": lambda: facts.ok.apply_async((1,), eta=datetime.now(UTC) - timedelta(hours=1)),
    "expires_not_reached": lambda: facts.ok.apply_async((1,), expires=300),
    "expires_in_past": lambda: facts.ok.apply_async((1,), expires=datetime.now(UTC) - timedelta(seconds=5)),
    "unknown_task": lambda: facts.app.send_task("no.such.task"),
    "malformed_message": _malformed,
    "link": lambda: facts.add.apply_async((1, 2), link=facts.callback.s("more")),
    "link_immutable": lambda: facts.add.apply_async((1, 2), link=facts.callback.si("only")),
    "link_error_old_sig": lambda: facts.boom.apply_async(link_error=facts.errback_old.s()),
    "link_error_new_sig": lambda: facts.boom.apply_async(link_error=facts.errback_new.s()),
    "link_error_on_retry_then_fail": lambda: facts.retry_exc.apply_async(link_error=facts.errback_old.s()),
    "chain": lambda: chain(facts.add.s(1, 2), facts.add.s(10), facts.add.s(100))(),
    "chain_fail_first": lambda: chain(facts.boom.s(), facts.add.s(10))(),
    "group": lambda: group(facts.add.s(i, i) for i in range(3))(),
    "chord": lambda: chord([facts.add.s(i, i) for i in range(3)], facts.tsum.s())(),
    "chord_header_fails": lambda: chord([facts.add.s(1, 1), facts.boom.s()], facts.tsum.s())(),
    "group_upgraded_to_chord": lambda: (group(facts.add.s(1, 0), facts.add.s(1, 0)) | facts.tsum.s())(),
    "spawn_child": lambda: facts.spawn_child.delay(),
    "replace": lambda: facts.replace_me.delay(),
    "shadow": lambda: facts.shadowed.delay(),
    "nested_call": lambda: facts.nested.delay(4),
    "custom_task_id": lambda: facts.ok.apply_async((1,), task_id="my own id: 7"),
    "routed": lambda: facts.routed.delay(),
}

#: What Celery's solo pool cannot do, or ends at; its prefork pool was measured.
ALONE: dict[str, Scenario] = {
    "on_failure_handler_raises": lambda: facts.bad_on_failure.delay(),
    "soft_time_limit": lambda: facts.soft_unhandled.delay(),
    "soft_time_limit_handled": lambda: facts.soft_handled.delay(),
    "hard_time_limit": lambda: facts.hard.delay(),
    "priority_order": lambda: _priorities(),
    "sysexit": lambda: facts.sysexit.delay(),
}


#: For the worker of more_tasks.py.
LOST: dict[str, Scenario] = {
    "lost_early": lambda: facts.app.send_task("facts.lost_early"),
    "lost_late_reject": lambda: facts.app.send_task("facts.lost_late_reject"),
}


def results_of(sent: Any) -> list[AsyncResult]:
    if isinstance(sent, GroupResult):
        return [each for result in sent.results for each in results_of(result)]
    parents = results_of(sent.parent) if sent.parent is not None else []
    return [*parents, sent]


def told(result: AsyncResult) -> dict[str, Any]:
    meta = result._get_task_meta()
    value = result.result
    return {
        "state": result.state,
        "result": repr(value),
        "kind": type(value).__name__,
        "traceback": bool(result.traceback),
        "children": len(result.children or ()),
        "name": meta.get("name"),
        "args": repr(meta.get("args")),
        "retries": meta.get("retries"),
        "queue": meta.get("queue"),
    }


def main(chosen: list[str]) -> None:
    scenarios = SCENARIOS | ALONE | LOST
    sent = {name: scenarios[name]() for name in chosen}
    results = {name: results_of(each) for name, each in sent.items()}
    print(json.dumps({name: [each.id for each in of] for name, of in results.items()}), flush=True)
    sys.stdin.readline()  # until the worker has done all of it
    print(json.dumps({name: [told(each) for each in of] for name, of in results.items()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
