"""A module of Celery tasks for each thing that Celery does with one; what happens is written to a file.

It runs unchanged on Celery's own worker and on ours: where its messages go is in the environment.
"""

from __future__ import annotations

import json
import os
import threading
import time
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from uuid import UUID

from celery import Celery, Task, current_task, signals
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

RECORD = Path(os.environ["RECORD"])  # noqa: TID251 -- tests are no part of the package

app = Celery(
    "facts",
    broker=os.environ["BROKER"],  # noqa: TID251
    backend=os.environ["BACKEND"],  # noqa: TID251
)
app.conf.update(
    task_default_queue="facts",
    result_extended=True,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
    task_routes={"facts.routed": {"queue": "mail:high"}},
)


def record(what: str, task_id: str | None = None, root_id: str | None = None, **more: object) -> None:
    line = json.dumps({"what": what, "id": task_id, "root": root_id, **more}, default=repr)
    with RECORD.open("a") as file:
        file.write(line + "\n")


class Hooked(Task):
    """Records its hooks."""

    def before_start(self, task_id, args, kwargs):
        record("Task.before_start", task_id, self.request.root_id)

    def on_success(self, retval, task_id, args, kwargs):
        record("Task.on_success", task_id, self.request.root_id)

    def on_failure(self, exc, task_id, args, kwargs, einfo):
        record("Task.on_failure", task_id, self.request.root_id, of=type(exc).__name__)

    def on_retry(self, exc, task_id, args, kwargs, einfo):
        record("Task.on_retry", task_id, self.request.root_id, of=repr(exc))

    def after_return(self, status, retval, task_id, args, kwargs, einfo):
        record(f"Task.after_return({status})", task_id, self.request.root_id)


def task(**options):
    def declare(function):
        return app.task(base=Hooked, name=f"facts.{function.__name__}", **options)(function)

    return declare


#: The thread that `worker_process_init` was sent in.
INIT: list[int] = []


@signals.worker_process_init.connect
def remember_thread(**kwargs):
    INIT.append(threading.get_ident())


def body(self) -> None:
    of_init = [threading.get_ident()] == INIT
    record("BODY", self.request.id, self.request.root_id, retries=self.request.retries, in_thread_of_init=of_init)


@task(bind=True)
def ok(self, a, b=2):
    body(self)
    return {"sum": a + b}


@task(bind=True)
def add(self, a, b):
    body(self)
    return a + b


@task(bind=True)
def tsum(self, numbers):
    body(self)
    return sum(numbers)


@task(bind=True)
def boom(self, *args):
    body(self)
    raise ValueError("boom")


class CustomError(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a}-{b}")


@task(bind=True)
def boom_custom(self):
    body(self)
    raise CustomError(1, 2)


@task(bind=True, throws=(KeyError,))
def boom_throws(self):
    body(self)
    raise KeyError("expected")


@task(bind=True, max_retries=3)
def retry_ok(self):
    body(self)
    if self.request.retries < 2:
        raise self.retry(countdown=0)
    return f"done after {self.request.retries}"


@task(bind=True)
def retry_newargs(self, a, b):
    body(self)
    if a == 1:
        raise self.retry(args=(2, "second"), countdown=0.1)
    return [a, b]


@task(bind=True, max_retries=2)
def retry_exc(self):
    body(self)
    raise self.retry(exc=ValueError("orig"), countdown=0.1)


@task(bind=True, max_retries=1)
def retry_noexc_exceed(self):
    body(self)
    raise self.retry(countdown=0)


@task(bind=True, max_retries=1)
def retry_in_except(self):
    body(self)
    try:
        raise KeyError("inner")
    except KeyError:
        self.retry(countdown=0)


@task(bind=True)
def retry_nothrow(self):
    body(self)
    if self.request.retries == 0:
        got = self.retry(countdown=0.2, throw=False)
        record("note", self.request.id, self.request.root_id, of=type(got).__name__)
        return "first"
    return "second"


@task(bind=True, autoretry_for=(ValueError,), retry_backoff=False, retry_kwargs={"max_retries": 2, "countdown": 0.1})
def autoretried(self):
    body(self)
    if self.request.retries < 2:
        raise ValueError("again")
    return self.request.retries


@task(bind=True)
def ign(self):
    body(self)
    raise Ignore()


@task(bind=True)
def ign_state(self):
    body(self)
    self.update_state(state="PROGRESS", meta={"done": 7})
    raise Ignore()


@task(bind=True)
def rej(self):
    body(self)
    raise Reject("no", requeue=False)


@task(bind=True, acks_late=True)
def rej_late(self):
    body(self)
    raise Reject("no", requeue=False)


@task(bind=True, acks_late=True)
def rej_requeue(self):
    body(self)
    again = self.request.delivery_info["redelivered"]
    record("note", self.request.id, self.request.root_id, redelivered=again)
    if not again:
        raise Reject("again", requeue=True)
    return self.request.retries


@task(bind=True, ignore_result=True)
def noresult(self):
    body(self)
    return 1


@task(bind=True, ignore_result=True)
def noresult_boom(self):
    body(self)
    raise ValueError("boom")


@task(bind=True, track_started=True)
def progress(self):
    body(self)
    states = [self.AsyncResult(self.request.id).state]
    self.update_state(state="PROGRESS", meta={"done": 1})
    states.append(self.AsyncResult(self.request.id).state)
    return states


@task(bind=True)
def unserializable(self):
    body(self)
    return object()


@app.task(bind=True, name="facts.bad_on_failure")
def bad_on_failure(self):
    body(self)
    raise ValueError("boom")


def _broken(*args, **kwargs):
    raise RuntimeError("handler broke")


bad_on_failure.on_failure = _broken


@app.task(bind=True, name="facts.bad_on_success")
def bad_on_success(self):
    body(self)
    return 1


bad_on_success.on_success = _broken


REQUEST = """
task args kwargs retries eta expires timelimit reply_to delivery_info headers properties argsrepr kwargsrepr lang shadow
ignore_result is_eager called_directly replaced_task_nesting stamps stamped_headers group group_index callbacks errbacks
chain chord parent_id hostname origin correlation_id
"""


@task(bind=True)
def dump_request(self, *args, **kwargs):
    request = self.request
    return {name: [type(getattr(request, name)).__name__, repr(getattr(request, name))] for name in REQUEST.split()}


@task(bind=True)
def types(self, *args):
    body(self)
    return [[type(each).__name__ for each in args], list(args)]


@app.task(name="facts.callback")
def callback(*args):
    request = current_task.request
    record("BODY callback", request.id, request.root_id, args=repr(args))
    return list(args)


@app.task(name="facts.errback_old")
def errback_old(task_id):
    request = current_task.request
    record("BODY errback_old", request.id, request.root_id)


@app.task(name="facts.errback_new")
def errback_new(request, exc, traceback):
    record("BODY errback_new", request.id, request.root_id, of=repr(exc))


@task(bind=True)
def spawn_child(self):
    body(self)
    child = ok.delay(1, 1)
    record("note", self.request.id, self.request.root_id, children=len(self.request.children))
    return child.parent is None


@task(bind=True)
def replace_me(self):
    body(self)
    raise self.replace(add.s(5, 10))


@app.task(name="facts.shadowed", shadow_name=lambda *args, **kwargs: "another.name")
def shadowed():
    return 1


@app.task(name="facts.typed")
def typed(a, b):
    return 1


@task(bind=True)
def routed(self):
    body(self)
    return self.request.delivery_info["routing_key"]


@task(bind=True)
def nested(self, number):
    """Calls another task like a function."""
    body(self)
    return [add(number, 1), current_task.name, self.request.retries]


@task(bind=True)
def sysexit(self):
    body(self)
    raise SystemExit(3)


# --- what neither Celery's solo pool nor its threads can do


def slowly(seconds: float) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        time.sleep(0.01)


@task(bind=True, soft_time_limit=0.3)
def soft_unhandled(self):
    body(self)
    slowly(20)


@task(bind=True, soft_time_limit=0.3)
def soft_handled(self):
    body(self)
    try:
        slowly(20)
    except SoftTimeLimitExceeded as error:
        record("note", self.request.id, self.request.root_id, args=list(error.args))
        return "cleaned"


@task(bind=True, time_limit=0.4)
def hard(self):
    body(self)
    try:
        slowly(20)
    except Exception:
        record("note", self.request.id, self.request.root_id, wrong="it saw an Exception")
        raise


@task(bind=True)
def sleeper(self, seconds):
    body(self)
    slowly(seconds)
    return "slept"


@task(bind=True)
def order(self, number):
    record("ORDER", self.request.id, self.request.root_id, number=number)
    slowly(0.1)


# --- signals


def _ids(kwargs):
    """The id, and the root's, of the task that a signal is about."""
    sender = kwargs.get("sender")
    request = kwargs.get("request")
    headers = kwargs.get("headers")
    if isinstance(headers, dict) and headers.get("id"):
        return headers["id"], headers.get("root_id")
    if isinstance(request, dict):
        return request["id"], request.get("root_id")
    if request is not None:
        return request.id, request.root_id
    of_sender = getattr(sender, "request", None)
    task_id = kwargs.get("task_id") or kwargs.get("id") or getattr(of_sender, "id", None)
    return task_id, getattr(of_sender, "root_id", None) or task_id


def _connect(name, signal):
    def handle(**kwargs):
        kinds = {key: type(value).__name__ for key, value in kwargs.items() if key not in ("signal", "sender")}
        sender = kwargs.get("sender")
        more = {"kinds": kinds, "sender": type(sender).__name__ if not isinstance(sender, str) else "str"}
        if name in ("before_task_publish", "after_task_publish"):
            more["of"] = sender
        if name == "task_postrun":
            more["of"] = kwargs["state"]
        if name == "task_revoked":
            more["of"] = [kwargs["terminated"], kwargs["expired"]]
        task_id, root_id = _ids(kwargs)
        record(name, task_id, root_id, **more)

    signal.connect(handle, weak=False)


for _name in (*signals.__all__, "import_modules"):
    if not _name.startswith(("eventlet", "setup_logging", "heartbeat", "user_preload")):
        _connect(_name, getattr(signals, _name))

VALUES = [datetime(2026, 1, 2, 3, 4, 5), UUID(int=7), Decimal("1.50"), b"bytes", (1, 2)]
