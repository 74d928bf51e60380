-- What the broker does in the store, each command in one step. The keys are Dramatiq's, so that its workers, its
-- producers and whatever looks at its queues go on working beside ours:
--
--   <namespace>:<queue>                       list of the ids that wait
--   <namespace>:<queue>.msgs                  hash of id to body: everything of the queue that is not acknowledged
--   <namespace>:<queue>.DQ, .DQ.msgs          the same for delayed messages, as producers send them
--   <namespace>:<queue>.XQ, .XQ.msgs          dead letters, by when they died
--   <namespace>:__acks__.<broker>.<queue>     set of the ids that a broker's worker has fetched
--   <namespace>:__heartbeats__                sorted set of brokers by when they were last heard of
--
-- and some of our own:
--
--   <namespace>:<queue>.DQ.due                sorted set of delayed ids by when they are due
--   <namespace>:<queue>.wake                  list that idle consumers block on; what is pushed wakes one of them
--   <namespace>:__away__                      there while no one is taken for dead, since the store was away itself
--
-- A delayed id is in the list .DQ (whoever pops it owns it) or in .DQ.due, never in both; when it is due, its body
-- moves from .DQ.msgs to .msgs as it is: whoever fetches it knows by its queue_name that its delay is over.
--
-- KEYS = {namespace}, ARGV = {command, queue, broker id, ...}

local namespace, command, queue, broker = KEYS[1], ARGV[1], ARGV[2], ARGV[3]

-- A queue is named with or without .DQ; both are one queue here.
local is_delayed = string.sub(queue, -3) == ".DQ"
local canonical = is_delayed and string.sub(queue, 1, -4) or queue

local waiting = namespace .. ":" .. canonical
local bodies = waiting .. ".msgs"
local delayed = waiting .. ".DQ"
local delayed_bodies = delayed .. ".msgs"
local own_bodies = is_delayed and delayed_bodies or bodies
local due = delayed .. ".due"
local wake = waiting .. ".wake"
local dead = waiting .. ".XQ"
local dead_bodies = dead .. ".msgs"
local heartbeats = namespace .. ":__heartbeats__"
local away = namespace .. ":__away__"
local function acks_of(who, name) return namespace .. ":__acks__." .. who .. "." .. name end

local DAY_MS = 86400000
local INGESTED_AT_ONCE, DUE_AT_ONCE = 1000, 500

local function now()
    local time = redis.call("time")
    return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Wakes one idle consumer; where none is idle, what is pushed waits for the next that is.
local function wake_one()
    redis.call("rpush", wake, 1)
    redis.call("pexpire", wake, DAY_MS)
end

local function heard_of(at)
    redis.call("zadd", heartbeats, at, broker)
end

-- Our own producers write when a message is due into its id; of another's the body is read.
local function due_of(id, at)
    local written = string.match(id, "@(%d+)$")
    if written then return tonumber(written) end
    local body = redis.call("hget", delayed_bodies, id)
    local read, message = pcall(cjson.decode, body or "")
    local options = read and type(message) == "table" and message.options
    return type(options) == "table" and tonumber(options.eta) or at
end

-- Moves what producers have delayed from their list to the sorted set.
local function ingest(at)
    local ids = redis.call("lpop", delayed, INGESTED_AT_ONCE)
    if not ids then return end
    for _, id in ipairs(ids) do
        redis.call("zadd", due, due_of(id, at), id)
    end
end

-- Moves what is due to its queue.
local function release(at)
    local ids = redis.call("zrangebyscore", due, "-inf", at, "LIMIT", 0, DUE_AT_ONCE)
    for _, id in ipairs(ids) do
        redis.call("zrem", due, id)
        local body = redis.call("hget", delayed_bodies, id)
        if body then
            redis.call("hset", bodies, id, body)
            redis.call("hdel", delayed_bodies, id)
            redis.call("rpush", waiting, id)
        end
    end
end

-- How long from now the next delayed message is due, in ms; -1: there is none.
local function next_due(at)
    if redis.call("llen", delayed) > 0 then return 0 end
    local first = redis.call("zrange", due, 0, 0, "WITHSCORES")
    if not first[2] then return -1 end
    return math.max(0, math.ceil(first[2] - at))
end

-- Puts ids at the front of a list, the first of them first.
local function push_front(list, ids)
    for i = #ids, 1, -1 do
        redis.call("lpush", list, ids[i])
    end
end

local function put_back(ids)
    push_front(waiting, ids)
    if #ids > 0 then wake_one() end
end

-- Gives back what a dead broker's worker has fetched under a queue's name; returns how many.
local function take_from(who, name, its_bodies, its_list)
    local acks = acks_of(who, name)
    local ids = {}
    for _, id in ipairs(redis.call("smembers", acks)) do
        if redis.call("hexists", its_bodies, id) == 1 then ids[#ids + 1] = id end
    end
    redis.call("del", acks)
    push_front(its_list, ids)
    return #ids
end


local commands = {}

-- enqueue(id, body): 1 when it is new, 0 when it was there already: an enqueue may be repeated.
function commands.enqueue(id, body)
    local new = redis.call("hsetnx", own_bodies, id, body)
    if new == 0 then return 0 end
    if is_delayed then
        redis.call("rpush", delayed, id)
        if redis.call("llen", wake) == 0 then wake_one() end
    else
        local length = redis.call("rpush", waiting, id)
        if redis.call("llen", wake) < length then wake_one() end
    end
    return 1
end

-- fetch(most, held): {ms to the next delayed message or -1, lost, id, body, id, body, ...}
--
-- `held` is how many fetched messages the worker knows of; `lost` is how many more it holds here, since the answer
-- that named them never arrived.
function commands.fetch(most, held)
    local at = now()
    heard_of(at)
    ingest(at)
    release(at)
    local answer = {0, math.max(0, redis.call("scard", acks_of(broker, canonical)) - held)}
    local ids = redis.call("lpop", waiting, tonumber(most)) or {}
    if #ids > 0 then
        redis.call("sadd", acks_of(broker, canonical), unpack(ids))
        local found = redis.call("hmget", bodies, unpack(ids))
        for i, id in ipairs(ids) do
            answer[#answer + 1] = id
            answer[#answer + 1] = found[i]
        end
    end
    -- A consumer that leaves something wakes the next one; one that leaves nothing lets no one look in vain.
    if redis.call("llen", waiting) == 0 then
        redis.call("del", wake)
    elseif redis.call("llen", wake) == 0 then
        wake_one()
    end
    answer[1] = next_due(at)
    return answer
end

-- ring(): serves what is due, and wakes one consumer for it.
function commands.ring()
    local at = now()
    ingest(at)
    release(at)
    if redis.call("llen", waiting) > 0 and redis.call("llen", wake) == 0 then wake_one() end
end

-- ack(id): 1 when it was this broker's to acknowledge, 0 when another has it, or has dealt with it.
function commands.ack(id)
    if redis.call("srem", acks_of(broker, queue), id) == 0 then return 0 end
    redis.call("hdel", own_bodies, id)
    return 1
end

-- nack(id): to the dead letters; answers as ack.
function commands.nack(id)
    if redis.call("srem", acks_of(broker, queue), id) == 0 then return 0 end
    local body = redis.call("hget", own_bodies, id)
    if body then
        redis.call("zadd", dead, now(), id)
        redis.call("hset", dead_bodies, id, body)
        redis.call("hdel", own_bodies, id)
    end
    return 1
end

-- Writes the row of an attempt that has ended in its place, or as the next; writing it again changes nothing. Returns
-- why it was refused, if it was.
local function close_row(key, number, text, kept_ms)
    local answer
    if number > 0 then
        answer = redis.pcall("lset", key, number - 1, text)
    else
        answer = redis.pcall("lindex", key, -1)
        if answer ~= text and not (type(answer) == "table" and answer.err) then
            answer = redis.pcall("rpush", key, text)
        end
    end
    local refusal = type(answer) == "table" and answer.err
    if not refusal then
        redis.call("pexpire", key, kept_ms)
    elseif not (string.find(refusal, "no such key") or string.find(refusal, "out of range")) then  -- else: expired
        return refusal
    end
end

-- settle(command, count, id x count, kept_ms, key, number, text, key, number, text, ...): acks or nacks ids and closes
-- rows. Answers for each id as the command does, and then with the position and the reason of each row refused.
--
-- The ids come first: a store that is full takes what makes room, and then in the same script the rows, too.
function commands.settle(how, count, ...)
    local given, answer = {...}, {}
    count = tonumber(count)
    for i = 1, count do answer[i] = commands[how](given[i]) end
    for i = count + 2, #given, 3 do
        local refusal = close_row(given[i], tonumber(given[i + 1]), given[i + 2], given[count + 1])
        if refusal then
            answer[#answer + 1] = (i - count - 2) / 3
            answer[#answer + 1] = refusal
        end
    end
    return answer
end

-- reclaim(id, ...): puts back what this broker's worker holds here beside these, and does not know of.
function commands.reclaim(...)
    local known, lost = {}, {}
    for _, id in ipairs({...}) do known[id] = true end
    for _, id in ipairs(redis.call("smembers", acks_of(broker, queue))) do
        if not known[id] then
            redis.call("srem", acks_of(broker, queue), id)
            if redis.call("hexists", bodies, id) == 1 then lost[#lost + 1] = id end
        end
    end
    put_back(lost)
    return #lost
end

-- requeue(id, ...): what was fetched and not begun, back to the front.
function commands.requeue(...)
    local ids = {}
    for _, id in ipairs({...}) do
        if redis.call("srem", acks_of(broker, queue), id) == 1 and redis.call("hexists", bodies, id) == 1 then
            ids[#ids + 1] = id
        end
    end
    put_back(ids)
end

-- recover(timeout, timeout of Dramatiq's own brokers, ttl of dead letters): how many messages came back.
--
-- Dramatiq's consumers say nothing while their worker is busy, so more is waited for before one is taken for dead.
function commands.recover(timeout, plain_timeout, dead_ttl)
    local at = now()
    local before = redis.call("zscore", heartbeats, broker)
    local last = redis.call("zrange", heartbeats, -1, -1, "WITHSCORES")
    heard_of(at)
    -- No one was heard of for long, this broker neither: the store was away. Everyone gets the time to be heard again.
    if before and at - before > timeout / 2 and at - last[2] > timeout / 2 then
        redis.call("set", away, 1, "PX", timeout)
    end
    if redis.call("exists", away) == 1 then return 0 end
    local recovered = 0
    for _, who in ipairs(redis.call("zrangebyscore", heartbeats, "-inf", at - timeout)) do
        local is_ours = string.sub(who, 1, 12) == "asyncworker-"
        if is_ours or tonumber(redis.call("zscore", heartbeats, who)) <= at - plain_timeout then
            recovered = recovered + take_from(who, canonical, bodies, waiting)
            recovered = recovered + take_from(who, canonical .. ".DQ", delayed_bodies, delayed)
            if #redis.call("keys", acks_of(who, "*")) == 0 then redis.call("zrem", heartbeats, who) end
        end
    end
    if recovered > 0 then wake_one() end
    local old = redis.call("zrangebyscore", dead, "-inf", at - dead_ttl, "LIMIT", 0, DUE_AT_ONCE)
    for _, id in ipairs(old) do
        redis.call("zrem", dead, id)
        redis.call("hdel", dead_bodies, id)
    end
    return recovered
end

-- leave(): this broker's worker has stopped; what it still holds is recovered by others at once.
function commands.leave()
    redis.call("zadd", heartbeats, "XX", 0, broker)
end

function commands.purge()
    redis.call("del", waiting, bodies, delayed, delayed_bodies, due, wake, dead, dead_bodies,
        acks_of(broker, canonical), acks_of(broker, canonical .. ".DQ"))
end

-- qsize(): everything of the queue that is not acknowledged, delayed messages too.
function commands.qsize()
    return redis.call("hlen", bodies) + redis.call("hlen", delayed_bodies)
end

return commands[command](unpack(ARGV, 4))
