"""The command `asyncworker`. Workers are Dramatiq's: `dramatiq asyncworker.actors`, one or several kept by `up`."""

from __future__ import annotations

import json
import logging
import os
from typing import Annotated, Any

import typer
from rich.table import Table

from asyncworker import cli_bridge, cli_cancel, cli_celery, cli_health, cli_once, cli_pace, cli_queues, cli_reap
from asyncworker import settings as settings_module
from asyncworker.errors import AsyncworkerError, ConfigurationError
from asyncworker.settings import EngineName, Settings, load
from asyncworker.terminal import Json, console, errors, fail, print_facts, print_json

app = typer.Typer(
    help="Dramatiq actors for browser work. Workers are started with: dramatiq asyncworker.actors",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The entry point: an error of ours is one sentence and exit code 2, never a traceback."""
    try:
        app()
    except AsyncworkerError as error:
        fail(str(error))


@app.command()
def demo(
    engine: Annotated[
        str, typer.Option(help="auto, or an engine: invisible, chromium, firefox, webkit, remote.")
    ] = "auto",
    url: Annotated[list[str] | None, typer.Option(help="Your own address instead of the shop's; repeatable.")] = None,
    as_json: Json = False,
) -> None:
    """Run a shop, a broker and a worker on this machine, kill one browser half way, and account for everything."""
    from asyncworker.demo.run import run_demo

    raise typer.Exit(run_demo(engine, urls=url or [], as_json=as_json, console=errors if as_json else console))


@app.command()
def send(
    actor: Annotated[str, typer.Argument(help="The actor's name, such as pages.title.")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments: JSON, or else text.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--arg", "-a", help="A keyword argument, name=value; repeatable.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The seed, 0 to 2**63-1; none: the deployment's.")] = None,
    delay: Annotated[int | None, typer.Option(help="Run it this many ms from now.", min=0)] = None,
    queue: Annotated[str | None, typer.Option(help="Another queue than the actor's own.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the result and print it.")] = False,
    timeout: Annotated[int, typer.Option(help="How many ms --wait waits.", min=1)] = 60_000,
    as_json: Json = False,
) -> None:
    """Send a message to an actor of this deployment."""
    from asyncworker.sending import send_message

    keywords = dict(_keyword(text) for text in option or [])
    if seed is not None:
        keywords["seed"] = seed
    sent = send_message(
        load(), actor, [_value(text) for text in args or []], keywords, delay_ms=delay, queue=queue, results=wait
    )
    if not wait:
        print_facts(sent.facts(), as_json, f"sent {sent.message.message_id} to {actor} with seed {sent.seed}")
        return
    answer = sent.wait(timeout)
    if answer.change is not None:
        errors.print(f"warning: {answer.change}", style="yellow", highlight=False, soft_wrap=True)
    print_facts(sent.facts() | answer.facts(), as_json, answer.sentence())
    raise typer.Exit(0 if answer.ok else 1)


@app.command(context_settings={"ignore_unknown_options": True})  # so that -1 is a wrong seed, not an unknown option
def identity(
    seed: Annotated[str, typer.Argument(help="The seed, 0 to 2**63-1.")],
    as_json: Json = False,
) -> None:
    """Show which visitor a seed is to the sites, with this deployment's pins, locale and time zone."""
    from asyncworker import identities

    shown = identities.show(load(), identities.read_seed(seed))
    if as_json:
        print_json(shown.facts())
    else:
        identities.render(shown, console)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def up(
    context: typer.Context,
    processes: Annotated[
        int | None, typer.Option("--processes", "-p", min=1, help="How many worker processes; none: one for each CPU.")
    ] = None,
    shutdown_ms: Annotated[
        int, typer.Option("--worker-shutdown-timeout", min=1, help="How many ms running messages get to end.")
    ] = 600_000,
) -> None:
    """Keep worker processes in the foreground, and the embedded Valkey when no broker is configured.

    One that dies is replaced, and the others go on. Further options are dramatiq's (-t, -Q, --watch, …), for each.
    SIGTERM or Ctrl-C stops them in order, a second one at once. Exit code 0: stopped in order; 1: a worker had to be
    killed; 2: it cannot start; 3: a worker died again and again.
    """
    from asyncworker import embedded

    settings = load()
    _refuse_what_is_for_one(context.args)
    started = False
    if settings.broker_url is None:
        started = not embedded.answers(embedded.socket_path(settings.state_dir))
        console.print(f"broker: embedded Valkey at {embedded.ensure(settings.state_dir)}", soft_wrap=True)
    try:
        code = _keep_workers(settings, context.args, processes or os.cpu_count() or 1, shutdown_ms)
    finally:
        if started:
            embedded.stop(settings.state_dir, for_good=False)
    raise typer.Exit(code)


@app.command()
def down() -> None:
    """Stop the embedded Valkey of this deployment; its data stays in the state directory."""
    from asyncworker import embedded

    settings = load()
    if settings.broker_url is not None:
        fail(f"the broker is {settings.broker_url}, which asyncworker did not start")
    stopped = embedded.stop(settings.state_dir)
    console.print(f"the embedded Valkey in {settings.state_dir} {'is stopped' if stopped else 'was not running'}")


@app.command()
def doctor(
    install: Annotated[bool, typer.Option("--install", help="Find or install the engine, too.")] = False,
    engine: Annotated[EngineName | None, typer.Option(help="Another engine than the settings'.")] = None,
    as_json: Json = False,
) -> None:
    """Examine this machine: would a worker run? Exit code 0 says yes."""
    from asyncworker import doctor as doctors
    from asyncworker import installing

    settings = load() if engine is None else load(engine=engine)
    if install:
        installing.install(settings, lambda line: errors.print(line, highlight=False, soft_wrap=True))
    checks = doctors.examine(settings)
    if as_json:
        print_json({"would_run": doctors.would_run(checks), "checks": [check.facts() for check in checks]})
    else:
        doctors.render(checks, console)
    raise typer.Exit(0 if doctors.would_run(checks) else 1)


@app.command("settings")
def show_settings(as_json: Json = False) -> None:
    """Print every setting with its value, where that came from, its default and its meaning."""
    rows = settings_module.describe(load())
    if as_json:
        print_json({row.variable: {"value": row.value, "source": row.source, "default": row.default} for row in rows})
        return
    table = Table("variable", "value", "source", "default", "meaning", show_lines=False)
    for row in rows:
        style = "bold" if row.source != "default" else None
        table.add_row(row.variable, row.value, row.source, row.default, row.meaning, style=style)
    console.print(table)


cli_queues.add_to(app)
cli_cancel.add_to(app)
cli_reap.add_to(app)
cli_health.add_to(app)
app.add_typer(cli_once.once, name="once")
app.add_typer(cli_pace.pace, name="pace")
cli_bridge.add_to(cli_celery.celery)
app.add_typer(cli_celery.celery, name="celery")


def _keep_workers(settings: Settings, options: list[str], count: int, shutdown_ms: int) -> int:
    from asyncworker.deployment import worker_command
    from asyncworker.supervisor import Policy, Supervisor

    # Dramatiq's own format, since its lines and the supervisor's stand side by side.
    form = "[%(asctime)s] [PID %(process)d] [%(threadName)s] [%(name)s] [%(levelname)s] %(message)s"
    logging.basicConfig(level=logging.INFO, format=form)
    command = worker_command(*options, "--processes", "1", "--worker-shutdown-timeout", str(shutdown_ms))
    return Supervisor(command, count, policy=Policy.of(settings, shutdown_ms=shutdown_ms)).run()


def _refuse_what_is_for_one(options: list[str]) -> None:
    """Options that name a file which only one process can have for itself."""
    for option in options:
        if option.partition("=")[0] in ("--pid-file", "--log-file"):
            fail(f"{option} is for one process, and `up` keeps several: it writes everything to stderr, redirect that")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _keyword(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise ConfigurationError(f"--arg {text} is no name=value")
    return name, _value(value)
