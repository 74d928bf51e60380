"""Settings from ASYNCWORKER_*: what a deployment may decide, with its default and its meaning.

This module is the only reader of the environment. Every duration is in milliseconds. A name that starts
with ASYNCWORKER_ and is no setting is an error: a misspelt setting that is silently ignored is found at
three in the morning.
"""

from __future__ import annotations

import difflib
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from asyncworker.errors import ConfigurationError
from asyncworker.identity import MAX_SEED
from asyncworker.stores import as_broker_url, as_store_url
from asyncworker.urls import Proxy, SecretUrl, taken_apart

PREFIX = "ASYNCWORKER_"

#: Contexts at once in one process, unless set: more than this measured no throughput on two cores, only
#: latency and memory.
DEFAULT_SLOTS = 4


class EngineName(StrEnum):
    """What launches or connects a browser."""

    invisible = "invisible"
    chromium = "chromium"
    firefox = "firefox"
    webkit = "webkit"
    remote = "remote"


class CeleryRates(StrEnum):
    """Who keeps the rate_limit of a Celery task."""

    deployment = "deployment"
    worker = "worker"


def _words(value: Any) -> Any:
    """Lists are written `a,b` or as JSON."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return tuple(word.strip() for word in value.split(",") if word.strip())


def _command_words(value: Any) -> Any:
    """Arguments of a command line hold commas, so they are written as a shell would take them, or as JSON."""
    if isinstance(value, str) and not value.lstrip().startswith("["):
        return tuple(shlex.split(value))
    return _words(value)


def _mapping(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _humanize(value: Any) -> Any:
    """`true`, `false`, or the seconds that one pointer motion may take."""
    words = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
    return words.get(value.lower(), value) if isinstance(value, str) else value


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_words)]
CommandWords = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_command_words)]
Millis = Annotated[int, Field(ge=1, le=7 * 24 * 3_600_000)]
MillisOrNever = Annotated[int, Field(ge=0, le=7 * 24 * 3_600_000)]
DirectoryPath = Annotated[Path, AfterValidator(_absolute)]


class Settings(BaseSettings):
    """All settings, frozen; each is read from the environment as ASYNCWORKER_<NAME>."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Values come from `load` only, which refuses unknown names and takes any mapping."""
        return (init_settings,)

    broker_url: Annotated[SecretUrl, AfterValidator(as_broker_url)] | None = Field(
        None,
        description="URL of the broker: redis://, rediss://, unix:// or redis+sentinel://; amqp:// or amqps:// for "
        "RabbitMQ, several separated by `;`; none: an embedded Valkey",
    )
    store_url: Annotated[SecretUrl, AfterValidator(as_store_url)] | None = Field(
        None,
        description="redis://, rediss://, unix:// or redis+sentinel:// URL of the store of results, the ledger and "
        "the seed; none: the broker, unless that is RabbitMQ",
    )
    state_dir: DirectoryPath = Field(
        Path(".asyncworker"), description="directory of the embedded Valkey: its socket, data and log"
    )
    actors: Words = Field(("actors",), description="packages or modules with the deployment's actors, comma-separated")
    celery_app: Words = Field(
        (),
        description="Celery apps whose tasks the workers run beside the actors, as `proj.app:app`, comma-separated; "
        "none: those in the actors package whose broker_url is asyncworker://",
    )
    celery_threads: int | None = Field(
        None,
        ge=1,
        le=64,
        description="threads of a worker process that runs Celery tasks; none: 1 where any of them is a plain "
        "function, so that these share what is made in `worker_process_init`",
    )

    celery_rates: CeleryRates = Field(
        CeleryRates.deployment,
        description="who keeps the rate_limit of a Celery task: deployment (all workers together) or worker (each "
        "worker process alone)",
    )

    engine: EngineName = Field(EngineName.invisible, description="what launches or connects a browser")
    executable_path: DirectoryPath | None = Field(
        None, description="the browser's executable; none: where the engine looks itself"
    )
    channel: str | None = Field(None, description="Playwright's channel, such as chrome or msedge")
    endpoint: SecretUrl | None = Field(
        None, description="for the engine remote: ws:// or wss:// of a Playwright server, http:// for CDP"
    )
    launch_args: CommandWords = Field(
        (), description="extra arguments of the browser's command line, as a shell takes them"
    )
    headless: bool = Field(True, description="run the browser without a window")
    proxy: SecretUrl | None = Field(None, description="the proxy of every browser, credentials in the URL")
    locale: str | None = Field(None, description="locale of the identity, such as en-US")
    timezone: str | None = Field(None, description="time zone of the identity, such as Europe/Berlin")
    pins: Annotated[dict[str, Any], NoDecode, BeforeValidator(_mapping)] = Field(
        default_factory=dict, description="JSON object of invisible_playwright's pins, field to value"
    )
    humanize: Annotated[bool | float, BeforeValidator(_humanize)] = Field(
        False, description="human pointer and typing: true, false, or most seconds for one motion"
    )
    seed: int | None = Field(
        None, ge=0, le=MAX_SEED, description="the deployment's seed; none: drawn once, kept in the store"
    )

    slots: int | None = Field(
        None,
        ge=1,
        le=64,
        description=f"contexts at once in one process; none: threads, {DEFAULT_SLOTS} at most",
    )
    max_browsers: int = Field(
        2, ge=1, le=64, description="browsers at once in one process; one more while one is replaced"
    )
    warm: bool = Field(False, description="launch the browser at boot, not at the first message")

    output_dir: DirectoryPath = Field(Path("output"), description="where the shipped actors may write files")
    allowed_schemes: Words = Field(("http", "https"), description="URL schemes that the shipped actors open")
    deny_private_hosts: bool = Field(
        False, description="refuse loopback, link-local and private addresses, also after redirects"
    )

    launch_timeout_ms: Millis = Field(60_000, description="for the browser to start")
    launch_backoff_ms: Millis = Field(
        1_000, description="pause after a failed launch, doubled each time up to a minute"
    )
    browser_wait_ms: Millis = Field(120_000, description="for a browser of the identity to be free or up")
    context_timeout_ms: Millis = Field(15_000, description="for a fresh context and its page to open")
    page_timeout_ms: Millis = Field(
        30_000,
        description="Playwright's default for one action or navigation, cut to what is left of the message",
    )
    close_timeout_ms: Millis = Field(20_000, description="for a context or a browser to close, before it is killed")
    cleanup_timeout_ms: Millis = Field(
        30_000, description="for the code of an interrupted attempt to end its own cleanup"
    )
    pace_file: DirectoryPath | None = Field(
        None, description="TOML file with the rates of hosts, which hold for all actors with a session; none: no such"
    )
    pace_hold_ms: Annotated[int, Field(ge=0, le=10_000)] = Field(
        250, description="a paced message that has to wait for no longer waits in its worker, else in the store"
    )
    time_limit_ms: Millis = Field(600_000, description="for one attempt, unless the actor sets time_limit")
    loop_block_limit_ms: Annotated[Millis, Field(ge=2_000)] = Field(
        60_000, description="for code to block the loop, before the worker process exits (code 75) to be replaced"
    )
    stop_timeout_ms: Millis = Field(
        30_000, description="for attempts still running at the end of a shutdown, before they are cancelled"
    )
    crash_loop_deaths: int = Field(
        5, ge=1, le=1_000, description="deaths of a worker in a row before `asyncworker up` gives up"
    )
    crash_loop_ready_ms: Millis = Field(
        5_000, description="a worker that was ready for this long before it died begins a new row"
    )
    send_timeout_ms: Millis = Field(10_000, description="for the broker to take a message from a producer")
    heartbeat_timeout_ms: Annotated[Millis, Field(ge=1_000)] = Field(
        15_000, description="a worker that was not heard of for this long is dead, and its messages are run elsewhere"
    )
    max_losses: int = Field(
        3,
        ge=1,
        description="so often the worker process may die under a message before that is dead-lettered, unless the "
        "actor sets it",
    )
    ledger_age_ms: Millis = Field(
        24 * 3_600_000, description="how long the ledger keeps the attempts of a message after the last of them"
    )
    ledger_rows: int = Field(
        1_500_000, ge=1, description="so many attempts the ledger keeps; the oldest are forgotten first"
    )
    recycle_after: Annotated[int, Field(ge=0)] = Field(
        1_000, description="contexts after which a browser, and its driver, is replaced by a new one; 0: never"
    )
    recycle_age_ms: MillisOrNever = Field(3_600_000, description="age at which a browser is replaced; 0: never")
    recycle_memory_mb: Annotated[int, Field(ge=0)] = Field(
        2_000,
        description="memory of all processes of a browser, its pages' and its driver's too, at which it is replaced; "
        "0: never",
    )
    recycle_check_ms: Millis = Field(10_000, description="between two looks at the age and the memory of browsers")
    recycle_drain_ms: Millis | None = Field(
        None,
        description="for the contexts of a browser that is replaced to end, before they are ended and their messages "
        "run again; none: longer than any of their time limits",
    )
    probe_interval_ms: MillisOrNever = Field(
        30_000,
        description="a browser that no message's page has finished loading in for this long is given a page of the "
        "worker's own to load; 0: never",
    )
    probe_timeout_ms: Millis = Field(
        10_000, description="for that page; a browser that fails twice in a row is replaced"
    )
    health_port: int = Field(
        0,
        ge=0,
        le=65_535,
        description="port of `/live` and `/ready` for all worker processes of this deployment on this host together: "
        "one of them listens and asks the others, another takes over when it ends; 0: none",
    )
    health_host: str = Field(
        "127.0.0.1", description="address that port is listened at; `0.0.0.0` or `::` for all interfaces"
    )
    once_ttl_ms: Millis = Field(604_800_000, description="how long a step of `session.once` that is done is known")
    result_ttl_ms: Millis = Field(600_000, description="how long results are kept, unless the actor sets it")

    @field_validator("proxy")
    @classmethod
    def _proxy_parses(cls, url: SecretUrl | None) -> SecretUrl | None:
        if url is not None:
            Proxy.parse(url.value)
        return url

    @field_validator("endpoint")
    @classmethod
    def _endpoint_is_known(cls, url: SecretUrl | None) -> SecretUrl | None:
        if url is not None and taken_apart(url.value).scheme not in ("ws", "wss", "http", "https"):
            raise ValueError("an endpoint starts with ws:// or wss:// (Playwright server) or http:// (CDP)")
        return url

    @model_validator(mode="after")
    def _remote_has_an_endpoint(self) -> Settings:
        if self.engine is EngineName.remote and self.endpoint is None:
            raise ValueError("the engine remote needs ASYNCWORKER_ENDPOINT")
        return self

    @model_validator(mode="after")
    def _rabbitmq_has_a_store(self) -> Settings:
        if self.broker_url is not None and self.broker_url.is_rabbitmq and self.store_url is None:
            raise ValueError(
                "ASYNCWORKER_BROKER_URL names RabbitMQ, which carries messages only; results, the ledger and the "
                "deployment's seed need a Redis or Valkey that all workers and producers reach: set "
                "ASYNCWORKER_STORE_URL=redis://…"
            )
        return self

    @model_validator(mode="after")
    def _rabbitmq_keeps_no_pace(self) -> Settings:
        if self.broker_url is not None and self.broker_url.is_rabbitmq and self.pace_file is not None:
            raise ValueError(
                "ASYNCWORKER_PACE_FILE needs Redis or Valkey as the broker, since paced messages wait in line there; "
                "ASYNCWORKER_BROKER_URL names RabbitMQ"
            )
        return self

    @property
    def proxy_parts(self) -> Proxy | None:
        """The proxy, taken apart; None: traffic leaves directly."""
        return Proxy.parse(self.proxy.value) if self.proxy else None


@dataclass(frozen=True)
class Setting:
    """One setting as `asyncworker settings` shows it; `value` and `default` are masked text."""

    variable: str
    value: str
    source: str
    default: str
    meaning: str


def load(environ: Mapping[str, str] | None = None, **values: Any) -> Settings:
    """Read the settings.

    Parameters:
        environ: The environment to read; None reads the process's own.
        values: Settings given in code, by field name; they win over the environment.

    Raises:
        ConfigurationError: When a name is unknown or a value cannot be used; it says which and why.
    """
    environ = os.environ if environ is None else environ  # noqa: TID251 -- this module is the one reader
    given = {name: environ[variable] for name, variable in _variables(environ) if environ[variable] != ""}
    try:
        return Settings(**(given | values))
    except ValidationError as error:
        raise ConfigurationError(_sentence(error), name=_first_name(error)) from None
    except ValueError as error:
        raise ConfigurationError(f"a setting does not parse: {error}; see `asyncworker settings`") from None


def describe(settings: Settings, environ: Mapping[str, str] | None = None) -> list[Setting]:
    """All settings in their declared order, with where each value came from."""
    environ = os.environ if environ is None else environ  # noqa: TID251 -- this module is the one reader
    present = {name for name, variable in _variables(environ) if environ[variable] != ""}
    read = load(environ) if present else None
    rows = []
    for name, field in Settings.model_fields.items():
        default = field.get_default(call_default_factory=True, validated_data={})
        source = "code" if name in settings.model_fields_set else "default"
        if name in present and getattr(settings, name) == getattr(read, name):
            source = "environment"
        rows.append(
            Setting(
                variable=PREFIX + name.upper(),
                value=_shown(getattr(settings, name)),
                source=source,
                default=_shown(default),
                meaning=field.description or "",
            )
        )
    return rows


def as_environment(settings: Settings) -> dict[str, str]:
    """The variables that give a child process the same settings, unmasked; only those that were set."""
    return {PREFIX + name.upper(): _written(getattr(settings, name)) for name in settings.model_fields_set}


def child_environment(**extra: str) -> dict[str, str]:
    """The environment for a browser, a driver or a server: without our settings, which may hold passwords."""
    environ = os.environ.copy()  # noqa: TID251 -- this module is the one reader
    return {name: text for name, text in environ.items() if not name.upper().startswith(PREFIX)} | extra


def worker_environment(**extra: str) -> dict[str, str]:
    """The environment for a worker process, which reads the same settings as this process."""
    return os.environ.copy() | extra  # noqa: TID251 -- this module is the one reader


def foreign(variable: str) -> str:
    """A variable that is not ours, such as PATH or DISPLAY; empty when it is not set."""
    return os.environ.get(variable, "")  # noqa: TID251 -- this module is the one reader


def leave_invisible_core_alone() -> None:
    """Call this before the first import of invisible_playwright or invisible_core.

    On a mismatch of versions they would run pip at import, in a worker, and replace their own files under
    the other workers. With this they raise instead, and `asyncworker doctor` names the command.
    """
    os.environ.setdefault("INVISIBLE_CORE_AUTOFIX", "off")  # noqa: TID251 -- the one writer, too


def markdown_table() -> str:
    """The settings as README's table."""
    lines = ["| variable | default | meaning |", "| --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        default = _shown(field.get_default(call_default_factory=True, validated_data={}))
        lines.append(f"| `{PREFIX}{name.upper()}` | {f'`{default}`' if default else ''} | {field.description} |")
    return "\n".join(lines)


def _variables(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(field, variable) of every ASYNCWORKER_ name present.

    Raises:
        ConfigurationError: For an unknown name; it names the nearest real one.
    """
    for variable in sorted(environ):
        if not variable.upper().startswith(PREFIX):
            continue
        name = variable[len(PREFIX) :].lower()
        if name not in Settings.model_fields:
            near = difflib.get_close_matches(name, Settings.model_fields, n=1, cutoff=0.0)[0]
            raise ConfigurationError(
                f"{variable} is no setting; the nearest is {PREFIX}{near.upper()} (all: `asyncworker settings`)",
                name=variable,
            )
        yield name, variable


def _first_name(error: ValidationError) -> str:
    where = error.errors()[0]["loc"]
    return PREFIX + str(where[0]).upper() if where else PREFIX + "*"


def _sentence(error: ValidationError) -> str:
    """One line for each wrong setting. The input is left out: it may hold a password."""
    lines = []
    for name, reasons in _by_name(error).items():
        lines.append(f"{name}: {'; '.join(reasons)}")
    return "\n".join(lines) + "\n(all settings: `asyncworker settings`)"


def _by_name(error: ValidationError) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for detail in error.errors(include_input=False, include_url=False, include_context=False):
        name = PREFIX + str(detail["loc"][0]).upper() if detail["loc"] else "settings"
        reasons.setdefault(name, []).append(detail["msg"].removeprefix("Value error, "))
    return reasons


def _written(value: object) -> str:
    """A value as a variable holds it."""
    if isinstance(value, SecretUrl):
        return value.value
    if isinstance(value, tuple | dict):
        return json.dumps(value)
    return "" if value is None else str(value)


def _shown(value: object) -> str:
    """A value as a person may see it: masked."""
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, SecretUrl) else _written(value)
