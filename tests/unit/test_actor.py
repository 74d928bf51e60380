"""@actor: names, seeds, and what is refused where it is declared."""

from __future__ import annotations

from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker

import asyncworker.testing
from asyncworker import Session, actor
from asyncworker.actor import SessionActor
from asyncworker.errors import ConfigurationError, DeclarationError, InvalidArguments, InvalidSeed
from asyncworker.testing import Document, FakeEngine, StubWorker


@pytest.fixture(autouse=True)
def fresh_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test declares on a broker of its own; none is connected to."""
    monkeypatch.setattr(dramatiq.broker, "global_broker", None)


def declared(**options: Any) -> SessionActor[..., str]:
    @actor(**options)
    async def title(session: Session, url: str, *, seed: int | None = None) -> str:
        await session.page.goto(url)
        return f"{await session.page.title()} {seed}"

    return title


def test_an_actor_is_named_after_its_module_below_the_actors_package() -> None:
    async def title(session: Session) -> None: ...

    title.__module__ = "actors.pages"
    assert actor(title).actor_name == "pages.title"


def test_an_actor_elsewhere_is_named_after_its_whole_module() -> None:
    async def title(session: Session) -> None: ...

    title.__module__ = "shop.scrapers"
    assert actor(title).actor_name == "shop.scrapers.title"


def test_declaring_and_building_a_message_with_a_seed_opens_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr("asyncworker.embedded.ensure", refuse)
    assert declared().message("https://shop.example/", seed=7).kwargs == {"seed": 7}


def test_the_seed_is_in_the_message_before_it_leaves_the_producer(stub_worker: StubWorker) -> None:
    with asyncworker.testing.stub_worker(seed=123):
        title = declared()
        assert title.message("https://shop.example/").kwargs["seed"] == 123
        assert title.send("https://shop.example/").kwargs["seed"] == 123
        assert title.send_with_options(args=("https://shop.example/",), delay=60_000).kwargs["seed"] == 123
        assert title.send("https://shop.example/", seed=0).kwargs["seed"] == 0


def test_an_identity_of_the_message_is_a_fresh_seed_for_each() -> None:
    with asyncworker.testing.stub_worker(seed=123):
        title = declared(identity="message")
        seeds = {title.message("https://shop.example/").kwargs["seed"] for _ in range(20)}
    assert len(seeds) == 20
    assert 123 not in seeds


@pytest.mark.parametrize("seed", [-1, 2**63, "7", 7.0, True, [1]])
def test_a_seed_that_is_none_is_refused_where_it_is_sent(seed: Any) -> None:
    with pytest.raises(InvalidSeed):
        declared().message("https://shop.example/", seed=seed)


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), (("a", "b"), {}), (("a",), {"colour": 1})])
def test_wrong_arguments_are_refused_where_they_are_sent_with_the_signature(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArguments, match=r"title\(url: str, \*, seed: int \| None = None\)"):
        declared().send(*args, **kwargs)


def test_an_actor_without_a_parameter_seed_gets_it_from_its_session() -> None:
    @actor(store_results=True, actor_name="seedless")
    async def seedless(session: Session, url: str) -> int:
        return session.seed

    with asyncworker.testing.stub_worker() as worker:
        message = seedless.message_with_options(args=("x",), kwargs={"seed": 5})
        assert worker.run(message) == 5


def test_dramatiqs_options_are_passed_on_and_unknown_ones_refused() -> None:
    title = declared(max_retries=7, time_limit=1_234, queue_name="shop", priority=3)
    assert (title.queue_name, title.priority) == ("shop", 3)
    assert title.options["max_retries"] == 7
    with pytest.raises(ValueError, match="undefined: colour"):
        declared(actor_name="other", colour=1)


def test_a_sync_function_is_refused_with_what_to_do() -> None:
    with pytest.raises(DeclarationError, match=r"async def.*to_thread.*@dramatiq\.actor"):
        actor(lambda session: None)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("async def f(): ...", "must take the session first"),
        ("async def f(*, session): ...", "must take the session first"),
        ("async def f(*args): ...", "must take the session first"),
        ("async def f(url: str): ...", "receives the session there"),
        ("async def f(seed, session): ...", "receives the session there"),
        ("async def f(session, seed, /): ...", "comes by name"),
        ("async def f(session): yield 1", "is not async"),
    ],
)
def test_a_wrong_signature_is_refused_where_it_is_declared(source: str, said: str) -> None:
    names: dict[str, Any] = {}
    exec(source, names)
    with pytest.raises(DeclarationError, match=said):
        actor(names["f"])


def test_an_unknown_identity_is_refused() -> None:
    with pytest.raises(DeclarationError, match="deployment, message"):
        declared(identity="url")


def test_two_actors_of_one_name_are_refused_and_both_are_named() -> None:
    declared(actor_name="title")
    with pytest.raises(
        DeclarationError, match=r"two actors are named 'title': .*declared.*title and .*declared.*title"
    ):
        declared(actor_name="title")


def test_a_broker_of_another_making_is_refused_with_the_remedy() -> None:
    dramatiq.set_broker(StubBroker())
    with pytest.raises(ConfigurationError, match=r"asyncworker\.get_broker\(\)"):
        declared()


def test_calling_an_actor_outside_a_worker_says_what_to_do_instead() -> None:
    with pytest.raises(RuntimeError, match=r"send\(\)"):
        declared()("https://shop.example/", seed=1)


def test_an_actor_is_tested_in_a_few_lines(fake_engine: FakeEngine) -> None:
    title = declared(store_results=True)
    fake_engine.documents["https://shop.example/"] = Document(title="Shop")
    with asyncworker.testing.stub_worker(engine=fake_engine) as worker:
        assert worker.run(title.message("https://shop.example/", seed=7)) == "Shop 7"
