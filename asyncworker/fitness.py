"""Fitness: a worker does not begin at a store that cannot be used, and says why.

What the store's user must be allowed is tried on a key of our own, in a round trip that leaves nothing.
"""

from __future__ import annotations

import logging
from typing import Any

import redis
from dramatiq import Worker
from dramatiq.middleware import Middleware
from redis.exceptions import NoPermissionError, ResponseError

from asyncworker.errors import BrokerUnavailable, ConfigurationError
from asyncworker.heartbeat import hasty
from asyncworker.middleware import BootFailed
from asyncworker.vetting import PERMISSIONS, Unfit

logger = logging.getLogger("asyncworker.broker")

#: Commands of broker.lua, each as it does no harm where there is nothing. What writes is undone at the end.
TRIED_IN_SCRIPTS = """
del K|exists K|get K|hdel K f|hexists K f|hget K f|hlen K|hincrby K f 1|hmget K f|hset K f v|hsetnx K f v|del K
keys K|lindex K 0|llen K|lpop K|lpush K v|lset K 0 v|rpush K v|pexpire K 1000|del K|sadd K v|scard K|sismember K v
smembers K|srem K v|set K v PX 1000|del K|time|zadd K 1 v|zcard K|zrange K 0 0|zrangebyscore K 0 0
zrevrangebyscore K 0 0|zrem K v|zscore K v|del K
"""

#: What is done outside of scripts: results, the ledger and the deployment's seed.
TRIED_ALONE = """
lrange K 0 0|mget K|rpoplpush K K|type K|script LOAD return|evalsha 0 0|multi|exec
"""

_SCRIPT = """
local refused = {}
for command in string.gmatch(ARGV[1], "[^|\\n]+") do
    local words = {}
    for word in string.gmatch(command, "%S+") do words[#words + 1] = word == "K" and KEYS[1] or word end
    local answer = redis.pcall(unpack(words))
    local said = type(answer) == "table" and answer.err or ""
    -- Redis before 7 says it in words of its own.
    if string.find(said, "NOPERM") or string.find(said, "ermission") or string.find(said, "user executing") then
        refused[#refused + 1] = words[1]
    end
end
return refused
"""


class Fitness(Middleware):
    """Asks the store at boot. One that is away is waited for later, as at any other time."""

    def before_worker_boot(self, broker: Any, worker: Worker) -> None:
        client = hasty(broker)
        try:
            check_permissions(client, broker.namespace)
        except ConfigurationError as error:
            raise BootFailed(f"this worker cannot start: the broker ({broker.where}): {error}") from error
        except (redis.RedisError, BrokerUnavailable) as error:
            logger.warning("the broker (%s) is away: %s", broker.where, error)
        finally:
            client.close()


def check_permissions(client: redis.Redis, namespace: str) -> None:
    """Try what asyncworker does in the store.

    Raises:
        Unfit: When the store cannot be used, or its user may not do something; it says what.
        redis.RedisError: When the store is away.
    """
    refused: dict[str, list[str]] = {}
    # A result's key is as long as this, and is no one's.
    for pattern, key in (
        (f"{namespace}*", f"{namespace}:__probe__"),
        ("asyncworker:*", "asyncworker:__probe__"),
        (32 * "?", "asyncworker-probe-of-the-results"),
    ):
        with client.pipeline(transaction=False) as pipe:
            pipe.eval(_SCRIPT, 1, key, TRIED_IN_SCRIPTS.strip())
            commands = [command.replace("K", key).split() for command in TRIED_ALONE.strip().split("|")]
            for command in commands:
                pipe.execute_command(*command)
            answers = pipe.execute(raise_on_error=False)
        names = _refused(answers, [command[0] for command in commands])
        if names:
            refused[pattern] = names
    if refused:
        what = "; ".join(f"on {pattern}: {', '.join(names)}" for pattern, names in refused.items())
        user = client.connection_pool.connection_kwargs.get("username") or "default"
        raise Unfit(
            f"the broker's user {user!r} may not run commands that asyncworker runs ({what})",
            f"give it what it needs: ACL SETUSER {user} {PERMISSIONS}",
        )


def _refused(answers: list[Any], alone: list[str]) -> list[str]:
    names: list[str] = []
    for name, answer in zip(["eval", *alone], answers, strict=True):
        if isinstance(answer, NoPermissionError):
            names.append(name)
        elif isinstance(answer, Exception) and not isinstance(answer, ResponseError):
            raise answer
    if isinstance(answers[0], list):
        names += [word.decode() if isinstance(word, bytes) else word for word in answers[0]]
    return names
