"""What does not type-check: each line that mypy complains about says with which code, and no other line does.

Never run. `# E: arg-type` is one error of that code on its line, `# E: arg-type, call-arg` are two, in
alphabetical order.
"""

from __future__ import annotations

from playwright.async_api import Page

from asyncworker import Session, actor, get_broker, open_session


@actor
async def title(session: Session, url: str, *, seed: int | None = None) -> str:
    return await session.page.title()


@actor(store_results=True, max_retries=3)
async def with_options(session: Session, url: str, *, seed: int | None = None) -> str:
    return await session.page.title()


@actor
async def without_seed(session: Session, url: str) -> str:
    return await session.page.title()


# --- sending

title.send(3)  # E: arg-type
with_options.send(3)  # E: arg-type
title.send()  # E: call-arg
with_options.send()  # E: call-arg
title.send("https://example.com", 42)  # E: call-arg
title.send("https://example.com", seed="42")  # E: arg-type
with_options.send("https://example.com", seed="42")  # E: arg-type
title.send("https://example.com", colour="blue")  # E: call-arg
without_seed.send("https://example.com", seed=42)  # E: call-arg
title.message(3)  # E: arg-type
title.send_with_options("https://example.com")  # E: arg-type, call-arg


async def producer() -> int:
    await title.asend(3)  # E: arg-type
    await title.asend()  # E: call-arg
    await title.asend("https://example.com", seed="42")  # E: arg-type
    await title.amessage("https://example.com", 42)  # E: call-arg
    await title.send("https://example.com").aresult()  # E: attr-defined
    await (await title.asend("https://example.com")).aresult(60)  # E: call-arg
    await get_broker().asend_many([title.message("https://example.com"), "https://example.com"])  # E: list-item
    return await (await title.asend("https://example.com")).aresult()  # E: return-value


wrong_result: int = title.send("https://example.com").get_result()  # E: assignment


# --- the session comes by itself, and only when the function is called by hand


async def by_hand(session: Session, page: Page) -> None:
    title.send(session, "https://example.com")  # E: arg-type, arg-type, call-arg
    await title.fn_async("https://example.com")  # E: arg-type, call-arg
    await title.fn_async(page, "https://example.com")  # E: arg-type
    await title.fn_async(session, 3)  # E: arg-type


# --- declaring


@actor  # E: arg-type
def not_async(session: Session, url: str) -> str:
    return url


@actor(max_retries=3)  # E: arg-type
def not_async_with_options(session: Session, url: str) -> str:
    return url


@actor  # E: arg-type
async def no_session() -> str:
    return ""


@actor(max_retries=3)  # E: arg-type
async def a_page_is_no_session(page: Page, url: str) -> str:
    return url


@actor(identity="worker")  # E: call-overload, untyped-decorator
async def another_identity(session: Session) -> None: ...


# --- a session's objects are Playwright's


async def misspelt(session: Session) -> None:
    await session.page.gotoo("https://example.com")  # E: attr-defined
    await session.page.goto("https://example.com", wait_until="domcontent")  # E: arg-type
    session.page = await session.context.new_page()  # E: misc


async def seeds_are_integers() -> None:
    async with open_session(seed="7"):  # E: arg-type
        pass
    async with open_session(7):  # E: call-arg
        pass
