"""Dramatiq actors for browser work: one long-lived browser a worker, a fresh context a message.

A map, top to bottom; each file may import what stands above it in its group or in an earlier group:

    errors, identity, urls, stores, settings     core: no queue, no browser library
    ending                                      who still calls a session that is over is told so
    phases, ledger                              where an attempt is and for how long; the account of attempts
    shielding, threads                          work that ends although its waiter is cancelled, or that blocks
    pace, limiter, memory_limiter, pacer        how often a site is asked; who may go when; how an attempt waits
    retry_after                                 how long a site wants to be left alone
    fencing, step_records, once                 which attempt is the latest; steps that are done once
    visitor                                     who a message was when it first ran
    guard, private_hosts                        what the shipped actors refuse
    lineage, processes, scratch, siblings       whose process or directory is this, and does it live;
    engines/                                    what launches a browser
    generation, launching, contexts             one browser; how it and its contexts begin and end
    turn, recycling, browser                    when it is replaced; the owner of all
    probing                                     whether a browser still finishes a navigation
    lending, watch, heeding                     a slot and a context; what ends the code; what a site says to all
    loop, session, runtime                      one attempt on it, and what its code receives
    lane, sync_face                             a synchronous face of a page, for any thread
    state_dirs, embedded, vetting               the edges: a store to begin with, and whether it will do
    connecting, patience                        how it is reached, and waited for
    settling, riding                            what is done is told together, or with what begins
    heartbeat, alarm                            who lives; what is due
    unique, paced, at_most_once                 messages that are there once, that have a pace, and that begin once
    cancellations                               which messages were cancelled
    attempt_log, backlog, accounting            a log line and a row for each attempt, also while the store is away
    middleware, time_limit, watchdog            what fires when; how long code may run, and what if it does not end
    interrupts                                  how what was cancelled ends
    hurry                                       what a signal stops, and a second one
    redelivery, losses, retries, fitness        which messages are run again; what a worker needs
    health_sockets, health_server, health       how a worker process is, asked from outside
    sync_session                                a session for synchronous code
    prefetch, supervised                        how much it takes; what stands above it, and hears that it is ready
    precedence, consumer                        which queue comes first; what takes messages off a queue
    exchange, delivery                          how a producer asks the store, and has it take messages
    result_watch, results, producing            where results lie, how a loop waits for them, and how it sends
    redis_broker                                Redis or Valkey as the broker
    speaking, rabbitmq_consumer, rabbitmq       RabbitMQ as the broker
    broker                                      which of them, and the order of its middleware
    cancelling                                  how a message is cancelled
    actor, last_words                           @actor; what a worker says that cannot begin
    celery/                                     Celery apps here, and the worker's browser for Celery's tasks
    deployment, actors                          the entry of `dramatiq asyncworker.actors`
    kept_worker, supervisor                     workers that are replaced when they die
    extras, commands, installing, sending       what the command `asyncworker` does,
    broker_checks, doctor                       how it looks at what is there,
    queues, paces, dead_letters, identities     what is in the store and what a seed is; with its
    demo/                                       demo
    terminal, cli_once, cli_dead_letters        its words,
    cli_queues, cli_pace, cli_reap, cli_health  its tables,
    cli_cancel, cli_bridge, cli_celery, cli     and what it prints
    fakes, testing, pytest_plugin               for users' tests and ours

Browser libraries are imported on use: importing this package costs a producer no 0.4 s.
"""

from asyncworker.actor import SessionActor, actor
from asyncworker.broker import get_broker
from asyncworker.cancelling import Cancellation, acancel, cancel
from asyncworker.errors import AsyncworkerError
from asyncworker.middleware import Middleware
from asyncworker.pace import Pace
from asyncworker.producing import SentMessage, aresult
from asyncworker.runtime import open_session
from asyncworker.session import Attempt, Session
from asyncworker.settings import Settings

__all__ = [
    "AsyncworkerError",
    "Attempt",
    "Cancellation",
    "Middleware",
    "Pace",
    "SentMessage",
    "Session",
    "SessionActor",
    "Settings",
    "acancel",
    "actor",
    "aresult",
    "cancel",
    "get_broker",
    "open_session",
]

__version__ = "0.1.0"
