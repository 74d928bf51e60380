"""The same three tasks on Celery, and natively: with equal results, also where they are retried."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncworker import embedded
from asyncworker.demo.site import Request, Response, ShopSite
from asyncworker.engines.finding import find
from asyncworker.settings import as_environment, child_environment, load
from tests.celery_workers import celery_worker
from tests.readme import ROOT
from tests.workers import Deployment

pytestmark = [pytest.mark.needs_browser, pytest.mark.timeout(180)]

EXAMPLES = ROOT / "examples"

#: What to send: the task's name, its arguments and its keyword arguments, by what this is about.
Calls = dict[str, tuple[str, list[Any], dict[str, Any]]]

#: Sends all, then waits for all results.
Answer = Callable[[Calls], dict[str, Any]]

#: A producer of Celery's, with the tasks' own app; it imports no task's module but by that.
PRODUCER = """
import json, sys
from tasks import app
sent = {what: app.send_task(*call) for what, call in json.load(sys.stdin).items()}
print(json.dumps({what: result.get(timeout=60) for what, result in sent.items()}))
"""


class Shop(ShopSite):
    """Each of its paths below /away/ leads nowhere, and below /busy/ to an error, when it is asked for first."""

    def respond(self, request: Request) -> Response:
        kind, _, rest = request.path[1:].partition("/")
        first = self.requests[request.path] == 1
        match kind:
            case "away" if first:
                return Response(status=302, headers={"Location": "http://127.0.0.1:9/"})  # no one listens there
            case "busy" if first:
                return Response("busy", status=503)
            case "away" | "busy":
                request = Request(f"/{rest}", request.query, request.headers)
        return super().respond(request)


def executable() -> dict[str, str]:
    """Where the browser is that our own engine finds, for tasks that launch one themselves."""
    found = find(load({}, engine="chromium"))
    return {} if found is None or found.executable is None else {"ASYNCWORKER_EXECUTABLE_PATH": str(found.executable)}


def by_celery(home: Path, environment: dict[str, str]) -> Answer:
    """What a process that has the tasks' app gets."""

    def answer(calls: Calls) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-c", PRODUCER],
            cwd=home,
            env=child_environment() | environment,
            input=json.dumps(calls),
            stdout=subprocess.PIPE,
            text=True,
            timeout=100,
            check=True,
        )
        answers: dict[str, Any] = json.loads(done.stdout)
        return answers

    return answer


@contextlib.contextmanager
def before(directory: Path) -> Iterator[Answer]:
    """Celery itself, with processes."""
    url, home = f"redis+socket://{embedded.ensure(directory)}", EXAMPLES / "celery_before"
    options = ("--pool", "prefork", "--concurrency", "1", "--without-mingle", "--without-gossip")
    with celery_worker("tasks", *options, cwd=home, url=url, log=directory / "celery.log", environment=executable()):
        yield by_celery(home, {"CELERY_BROKER_URL": url, "CELERY_RESULT_BACKEND": url})


@contextlib.contextmanager
def adapter(directory: Path) -> Iterator[Answer]:
    """Our worker, with Celery's tasks."""
    deployment, home = Deployment(directory), EXAMPLES / "celery_adapter"
    app = {"ASYNCWORKER_CELERY_APP": "tasks:app"}
    with deployment.worker("-p", "1", "-t", "1", cwd=home, environment=app) as worker:
        worker.ready()
        yield by_celery(home, as_environment(deployment.settings) | app)
        assert worker.stop() == 0
    close(deployment)


@contextlib.contextmanager
def after(directory: Path) -> Iterator[Answer]:
    """Our worker, without Celery."""
    deployment = Deployment(directory)

    def answer(calls: Calls) -> dict[str, Any]:
        sent = {what: deployment.send(name, *args, **kwargs) for what, (name, args, kwargs) in calls.items()}
        return {what: deployment.result(message, timeout_s=60) for what, message in sent.items()}

    with deployment.worker("-p", "1", "-t", "1", cwd=EXAMPLES / "celery_after") as worker:
        worker.ready()
        yield answer
        assert worker.stop() == 0
    close(deployment)


def close(deployment: Deployment) -> None:
    deployment.broker.close()
    deployment.broker.client.close()


SIDES = {
    "before": before,
    "after": after,
}


def calls(site: ShopSite) -> Calls:
    """All tasks, plainly and where they have to be retried."""
    return {
        "title": ("tasks.title", [site.product_url(3)], {"seed": 3}),
        "title, at the second attempt": ("tasks.title", [f"{site.url}/away/products/4"], {"seed": 4}),
        "price": ("tasks.price", [site.product_url(5)], {"seed": 5}),
        "price, at the second attempt": ("tasks.price", [f"{site.url}/busy/products/6"], {"seed": 6}),
        "wander": ("tasks.wander", [site.list_url, 3], {"seed": 7}),
        "wander, the same way again": ("tasks.wander", [site.list_url], {"steps": 3, "seed": 7}),
        "wander, another way, at the second attempt": ("tasks.wander", [f"{site.url}/away/"], {"seed": 8}),
    }


def expected(site: ShopSite) -> dict[str, Any]:
    """What follows from the site itself."""

    def price(number: int) -> dict[str, Any]:
        product = site.product(number)
        return {"name": product.title, "price": product.price, "width": 390, "seed": number}

    return {
        "title": f"{site.product(3).title} – Holm Goods",
        "title, at the second attempt": f"{site.product(4).title} – Holm Goods",
        "price": price(5),
        "price, at the second attempt": price(6),
    }


def test_the_three_tasks_have_equal_results_on_each_side(state_dir: Path) -> None:
    answers: dict[str, dict[str, Any]] = {}
    for name, side in SIDES.items():
        with Shop() as site, side(state_dir) as answer:
            answers[name] = answer(calls(site))
            assert answers[name] | expected(site) == answers[name]
            again = {path: number for path, number in site.requests.items() if path.startswith(("/away", "/busy"))}
            assert again == {"/away/products/4": 2, "/busy/products/6": 2, "/away/": 2}, name
    first = answers["before"]
    assert first["wander"] == first["wander, the same way again"]
    assert len(first["wander"]) == 3
    assert {name: each for name, each in answers.items() if each != first} == {}
