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
--   <namespace>:<queue>.paused                since when the queue is paused; there is none while it is not
--   <namespace>:<queue>.losses                hash of id to how often it was lost: begun by a worker that died then
--   <namespace>:__ahead__.<broker>.<queue>    set of the ids that a broker's worker has fetched ahead and not begun
--   <namespace>:<queue>.unique                hash of unique messages: what holds k.<key>, and each id's message and key
--   <namespace>:__queues__                    sorted set of queues by when a worker consumed them last
--   <namespace>:__sent__.<broker>.<slot>      the first id of what a producer has sent last from this slot, for a while
--   <namespace>:__fence__                     the last fence: a number that each message gets when it is fetched
--   <namespace>:__beat__                      when any worker of ours last looked for dead ones
--   <namespace>:__cancelled__                 sorted set of all cancelled message ids by when they are forgotten, and
--   <namespace>:__cancelled__.serial          a number that changes with each of them (cancellations.py)
--   <namespace>:__pace__:...                  what is paced (pacing.lua): also the lines of ids that wait for their pace
--   <namespace>:__places__.<host>             where the workers of a host live, by their brokers (siblings.py)
--   <namespace>:__away__                      there while no one is taken for dead, since the store was away itself
--
-- A delayed id is in the list .DQ (whoever pops it owns it) or in .DQ.due, never in both; when it is due, its body
-- moves from .DQ.msgs to .msgs as it is: whoever fetches it knows by its queue_name that its delay is over.
--
-- The id of a paced message that was sent by ours ends with what it is counted by (paced.py), so that a fetch has it
-- wait in line without handing it out. There its body stays in .msgs, and its id is in no list.
--
-- What moves a message writes where it goes before it takes it from where it was, and changes nothing when it is
-- repeated: whatever the store refuses in between, the message is still where it was.
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
local paused = waiting .. ".paused"
local losses = waiting .. ".losses"
local unique = waiting .. ".unique"
local heartbeats = namespace .. ":__heartbeats__"
local consumed = namespace .. ":__queues__"
local fence = namespace .. ":__fence__"
local beat = namespace .. ":__beat__"
local away = namespace .. ":__away__"
local function acks_of(who, name) return namespace .. ":__acks__." .. who .. "." .. name end
local function ahead_of(who, name) return namespace .. ":__ahead__." .. who .. "." .. name end

local DAY_MS = 86400000
local INGESTED_AT_ONCE, DUE_AT_ONCE = 1000, 500

-- When a broker was last heard of whose worker has stopped.
local LEFT = 0

-- The score of a broker whose process is known to be dead.
local DIED = 1

local function now()
    local time = redis.call("time")
    return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- A full store (maxmemory) refuses the first write of a script if that needs memory, and none after one that needs
-- none. Every command of a worker's begins with this, since workers are who makes room: only what producers send is
-- refused. The key is never there.
local function though_full() redis.call("del", namespace .. ":__none__") end

local function is_paused() return redis.call("exists", paused) == 1 end

-- Wakes one idle consumer; where none is idle, what is pushed waits for the next that is. Of a paused queue none is
-- woken: it would look in vain.
local function wake_one()
    if is_paused() then return end
    redis.call("rpush", wake, 1)
    redis.call("pexpire", wake, DAY_MS)
end

-- enqueue(id, body, id, body, ...): how many are new; what was there already is left as it is.
--
-- All or none: a store that is full, or takes no writes, refuses a script's first write, and none after it.
-- Where something lies in `wake`, no consumer is idle: the next that would be takes it. One is woken also for many
-- messages: a consumer that leaves something wakes the next.
local function enqueue(...)
    local given, new = {...}, {}
    for i = 1, #given, 2 do
        if redis.call("hsetnx", own_bodies, given[i], given[i + 1]) == 1 then new[#new + 1] = given[i] end
    end
    if #new == 0 then return 0 end
    redis.call("rpush", is_delayed and delayed or waiting, unpack(new))
    if redis.call("llen", wake) == 0 then wake_one() end
    return #new
end

-- send(slot, kept_ms, id, body, id, body, ...): enqueues, unless that is what was sent last from this slot: a producer
-- that got no answer sends again, and meanwhile its messages may have been run, and forgotten.
local function send(slot, kept_ms, first, ...)
    local memory = namespace .. ":__sent__." .. broker .. "." .. slot
    if redis.call("get", memory) == first then return 0 end
    local new = enqueue(first, ...)
    redis.call("set", memory, first, "PX", kept_ms)
    return new
end

-- What producers and busy workers ask for stands first, and is done before the rest is made: that takes longer.
if command == "send" then return send(unpack(ARGV, 4)) end

local function heard_of(at)
    redis.call("zadd", heartbeats, at, broker)
end

-- What is paced is known by its queue and its id. The account is made when there is something to ask it.
local pace = namespace .. ":__pace__"
local account
local function paces()
    account = account or pacing(pace)
    return account
end
local function member_of(id) return canonical .. " " .. id end
local function is_pacing() return redis.call("exists", pace .. ":members") == 1 end

local function subject_of(id)
    local marked = string.match(id, "~(.*)$")
    return marked and (string.match(marked, "^(.*)@%d+$") or marked)
end

local function wake_other(name)
    local its = namespace .. ":" .. name
    if redis.call("exists", its .. ".paused") == 1 or redis.call("llen", its .. ".wake") > 0 then return end
    redis.call("rpush", its .. ".wake", 1)
    redis.call("pexpire", its .. ".wake", DAY_MS)
end

-- Puts those whose pace lets them go to the front of their queues.
local function admit()
    if redis.call("zcard", pace .. ":due") == 0 then return end
    paces().admit(function(members)
        for i = #members, 1, -1 do
            local name, id = string.match(members[i], "^(%S+) (.*)$")
            redis.call("lpush", namespace .. ":" .. name, id)
            if name ~= canonical then wake_other(name) end
        end
    end)
end

-- How long from now the next line is to be looked at, in ms; -1: there is none.
local function next_pace()
    if redis.call("zcard", pace .. ":due") == 0 then return -1 end
    return math.ceil(paces().next_due() / 1000)
end

-- What was paced among these ids is so no more. Who has waited for one of them goes.
local function unpace(ids)
    if not is_pacing() then return end
    for _, id in ipairs(ids) do paces().done(member_of(id)) end
    admit()
    if redis.call("llen", waiting) > 0 then wake_other(canonical) end
end

-- Our own producers write when a message is due into its id; of another's the body is read.
local function due_of(id, at)
    local written = string.match(id, "@(%d+)$")
    if written then return tonumber(written) end
    local body = redis.call("hget", delayed_bodies, id)
    local read, message = pcall(cjson.decode, body or "")
    local options = read and type(message) == "table" and message.options
    local eta = type(options) == "table" and tonumber(options.eta)
    return eta and eta == eta and eta or at  -- no number equals itself but a number: JSON from Python may hold a NaN
end

-- Moves what producers have delayed from their list to the sorted set.
local function ingest(at)
    local ids = redis.call("lrange", delayed, 0, INGESTED_AT_ONCE - 1)
    if #ids == 0 then return end
    for _, id in ipairs(ids) do
        redis.call("zadd", due, due_of(id, at), id)
    end
    redis.call("ltrim", delayed, #ids, -1)
end

-- Moves what is due to its queue.
local function release(at)
    local ids = redis.call("zrangebyscore", due, "-inf", at, "LIMIT", 0, DUE_AT_ONCE)
    for _, id in ipairs(ids) do
        local body = redis.call("hget", delayed_bodies, id)
        if body then
            redis.call("hset", bodies, id, body)
            redis.call("rpush", waiting, id)
            redis.call("hdel", delayed_bodies, id)
        end
        redis.call("zrem", due, id)
    end
end

-- How long from now the next delayed message is due, in ms; -1: there is none, or no one may fetch it then.
local function next_due(at)
    if is_paused() then return -1 end
    if redis.call("llen", delayed) > 0 then return 0 end
    local first, paced = redis.call("zrange", due, 0, 0, "WITHSCORES"), next_pace()
    if not first[2] then return paced end
    local left = math.max(0, math.ceil(first[2] - at))
    return paced >= 0 and math.min(paced, left) or left
end

-- The first of so many fences: each is greater than all before. A count that is more than a second behind the time goes
-- on from there, so that they also grow where the store has lost what it knew, or a replica took its place that had not
-- heard of the last ones.
local function fences(at, count)
    local last = redis.call("incrby", fence, count)
    if last < (at - 1000) * 1000 then
        last = at * 1000 + count
        redis.call("set", fence, string.format("%.0f", last))
    end
    return last - count + 1
end

-- How often each of these ids was lost: {place, times, place, times, ...}, for those that ever were.
local function losses_of(ids)
    local answer = {}
    if redis.call("exists", losses) == 1 then
        for i, times in ipairs(redis.call("hmget", losses, unpack(ids))) do
            if times then
                answer[#answer + 1] = i - 1
                answer[#answer + 1] = tonumber(times)
            end
        end
    end
    return answer
end

local PARKED_AT_ONCE = 500

-- The first ids that may go, so many at most, and how many are to be taken off the list for that: what has to wait for
-- its pace is in line then.
--
-- exit: where paced traffic leaves here; nil: this worker knows of no paces.
local function choose(most, exit, window)
    if not exit then
        local ids = redis.call("lrange", waiting, 0, most - 1)
        return ids, #ids
    end
    local chosen, looked_at = {}, 0
    while #chosen < most and looked_at < PARKED_AT_ONCE do
        local some = redis.call("lrange", waiting, looked_at, looked_at + math.max(most, looked_at) - 1)
        if #some == 0 then break end
        for _, id in ipairs(some) do
            if #chosen == most then break end
            local subject = subject_of(id)
            looked_at = looked_at + 1
            if not subject or redis.call("hexists", bodies, id) == 0
                or paces().arrive(subject .. "|" .. exit, member_of(id), window) then
                chosen[#chosen + 1] = id
            end
        end
    end
    return chosen, looked_at
end

-- fetch(most, held, free, id, ...):
-- {ms to the next delayed message or -1, astray, losses, fence, id, body, id, body, ...}
--
-- `held` is how many fetched messages the worker knows of; `astray` is how many more it holds here, since the answer
-- that named them never arrived. The first `free` of those that it gets begin at once; the others are fetched ahead,
-- and the given ids are what it has fetched ahead and has begun meanwhile. What was lost before may have to wait even
-- then, and so begins when its worker says so. `fence` is that of the first message; the next has the next.
local function fetch(exit, window, most, held, free, ...)
    local at, ahead = now(), ahead_of(broker, canonical)
    though_full()
    heard_of(at)
    ingest(at)
    release(at)
    admit()
    most = tonumber(most)
    if select("#", ...) > 0 then redis.call("srem", ahead, ...) end
    local answer = {0, math.max(0, redis.call("scard", acks_of(broker, canonical)) - held), {}, 0}
    local ids, taken = {}, 0
    if not is_paused() then ids, taken = choose(most, exit, window) end
    if #ids > 0 then
        answer[4] = fences(at, #ids)
        redis.call("sadd", acks_of(broker, canonical), unpack(ids))
        redis.call("srem", ahead, unpack(ids))  -- a plain worker that has taken one back meanwhile knows nothing of this
        if #ids > tonumber(free) then redis.call("sadd", ahead, unpack(ids, free + 1)) end
        redis.call("lpop", waiting, taken)
        answer[3] = losses_of(ids)
        for i = 1, #answer[3], 2 do redis.call("sadd", ahead, ids[answer[3][i] + 1]) end
        local found = redis.call("hmget", bodies, unpack(ids))
        for i, id in ipairs(ids) do
            answer[#answer + 1] = id
            answer[#answer + 1] = found[i]
        end
    elseif taken > 0 then
        redis.call("lpop", waiting, taken)
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

if command == "fetch" then return fetch(nil, 0, unpack(ARGV, 4)) end

-- fetch_paced(exit, window, most, held, free, id, ...): as fetch, for a worker that knows of paces: what has to wait for
-- longer than `window`, in microseconds, goes to the line of its subject and this exit.
if command == "fetch_paced" then return fetch(ARGV[4], tonumber(ARGV[5]), unpack(ARGV, 6)) end

local commands = {enqueue = enqueue}

-- Does this id belong to a message that is to be there once? Its producer has written that into the id, so that what is
-- done with all others costs nothing.
local function is_unique(id) return string.sub(id, 1, 2) == "u." end

-- Lets go of the key that a unique message holds, and unless it may come back (`is_kept`), of what is known of it.
local function let_go(id, is_kept)
    local known = redis.call("hget", unique, id)
    local key = known and string.match(known, "^[^\n]*\n(.*)$")
    if not key then return end
    local lock = redis.call("hget", unique, "k." .. key)
    if lock and string.sub(lock, 1, #id + 1) == id .. " " then redis.call("hdel", unique, "k." .. key) end
    if not is_kept then redis.call("hdel", unique, id) end
end

-- Forgets of these ids what was this broker's; returns for each a 1 when it was this broker's to acknowledge, a 0 when
-- another has it, or has dealt with it.
local function ack(ids)
    local acks, answer, done = acks_of(broker, queue), {}, {}
    for i, id in ipairs(ids) do
        answer[i] = redis.call("srem", acks, id)
        if answer[i] == 1 then
            done[#done + 1] = id
            if is_unique(id) then let_go(id) end
        end
    end
    if #done > 0 then
        redis.call("hdel", own_bodies, unpack(done))
        redis.call("hdel", losses, unpack(done))
        redis.call("srem", ahead_of(broker, queue), unpack(done))  -- what was lost before, and then never began
        unpace(done)
    end
    return answer
end

-- ack(id): as above.
function commands.ack(id) return ack({id})[1] end

-- nack(id): to the dead letters; answers as ack.
function commands.nack(id)
    if redis.call("sismember", acks_of(broker, queue), id) == 0 then return 0 end
    though_full()
    local body = redis.call("hget", own_bodies, id)
    if body then
        redis.call("hset", dead_bodies, id, body)
        redis.call("zadd", dead, now(), id)
        redis.call("hdel", own_bodies, id)
        if is_unique(id) then let_go(id, true) end
    end
    redis.call("hdel", losses, id)
    redis.call("srem", acks_of(broker, queue), id)
    redis.call("srem", ahead_of(broker, queue), id)
    unpace({id})
    return 1
end

-- Notes that there are rows, each by its message's key and its number, and forgets the oldest where there are more than
-- may be, a thousand at once at most. The ledger does the same for rows that it opens (ledger.lua).
local function remember(rows, kept_ms, most)
    if #rows == 0 then return end
    local order = string.match(rows[1][1], "^(.*):")
    for _, row in ipairs(rows) do redis.call("rpush", order, string.sub(row[1], #order + 2) .. " " .. row[2]) end
    redis.call("pexpire", order, kept_ms)
    for _ = 1, math.min(1000, redis.call("llen", order) - most) do
        local id, oldest = string.match(redis.call("lpop", order), "^(.*) (%d+)$")
        local key = id and order .. ":" .. id
        if key and redis.call("llen", key) <= tonumber(oldest) then
            redis.call("del", key)
        elseif key then  -- the number of a row is its place, so a forgotten one leaves it empty
            redis.call("lset", key, oldest - 1, "")
        end
    end
end

-- Writes the row of an attempt that has ended in its place, or as the next; writing it again changes nothing. Returns
-- why it was refused, if it was. Where it is the next, its key and its number are added to `new`.
local function close_row(key, number, text, kept_ms, new)
    local answer
    if number > 0 then
        answer = redis.pcall("lindex", key, number - 1)
        -- What is forgotten stays so, and what was lost when its worker, which was frozen, goes on; so ledger_replace.lua.
        if answer == "" or type(answer) == "string" and string.find(answer, '"outcome":"lost"', 1, true) then return end
        answer = redis.pcall("lset", key, number - 1, text)
    else
        answer = redis.pcall("lindex", key, -1)
        if answer ~= text and not (type(answer) == "table" and answer.err) then
            answer = redis.pcall("rpush", key, text)
            if type(answer) == "number" then new[#new + 1] = {key, answer} end
        end
    end
    local refusal = type(answer) == "table" and answer.err
    if not refusal then
        redis.call("pexpire", key, kept_ms)
    elseif not (string.find(refusal, "no such key") or string.find(refusal, "out of range")) then  -- else: expired
        return refusal
    end
end

-- settle(command, count, id x count, kept_ms, most, key, number, text, key, number, text, ...): acks or nacks ids and
-- closes rows, of which so many are kept for so long. Answers for each id as the command does, and
-- then with the position and the reason of each row refused.
--
-- The ids come first: a store that is full takes what makes room, and then in the same script the rows, too.
local function settle(how, count, ...)
    local given, answer, new = {...}, {}, {}
    count = tonumber(count)
    if how == "ack" then
        answer = ack({unpack(given, 1, count)})
    else
        for i = 1, count do answer[i] = commands[how](given[i]) end
    end
    local kept_ms, most = given[count + 1], tonumber(given[count + 2])
    for i = count + 3, #given, 3 do
        local refusal = close_row(given[i], tonumber(given[i + 1]), given[i + 2], kept_ms, new)
        if refusal then
            answer[#answer + 1] = (i - count - 3) / 3
            answer[#answer + 1] = refusal
        end
    end
    remember(new, kept_ms, most)
    return answer
end

if command == "settle" then return settle(unpack(ARGV, 4)) end

-- begin(id, ...): what was lost before, or is of a queue that says so, begins now. What else is given is what `settle`
-- takes, and is settled with it.
local function begin(id, ...)
    though_full()
    redis.call("srem", ahead_of(broker, queue), id)
    return select("#", ...) > 0 and settle(...) or {}
end

if command == "begin" then return begin(unpack(ARGV, 4)) end

-- Puts ids at the front of a list, the first of them first.
local function push_front(list, ids)
    for i = #ids, 1, -1 do
        redis.call("lpush", list, ids[i])
    end
end

-- What goes to another worker has no slot there yet.
local function pace_again(ids)
    if not is_pacing() then return end
    for _, id in ipairs(ids) do paces().lost(member_of(id)) end
end

-- Puts back what this broker's worker has fetched, the first of them first.
local function put_back(ids)
    if #ids == 0 then return 0 end
    local acks, there = acks_of(broker, queue), {}
    for _, id in ipairs(ids) do
        if redis.call("hexists", bodies, id) == 1 then there[#there + 1] = id end
    end
    push_front(waiting, there)
    redis.call("srem", acks, unpack(ids))
    redis.call("srem", ahead_of(broker, queue), unpack(ids))
    pace_again(ids)
    if #there > 0 then wake_one() end
    return #there
end

-- A plain worker that is done with a message that was lost before leaves its count; later losses clear it away.
local function forget_some_losses()
    for _, id in ipairs(redis.call("hrandfield", losses, 16)) do
        if redis.call("hexists", bodies, id) + redis.call("hexists", delayed_bodies, id) == 0 then
            redis.call("hdel", losses, id)
        end
    end
end

-- Gives back what a dead broker's worker has fetched under a queue's name; returns how many. What it had begun is
-- lost, and counted, where that is known: of a worker of ours that has not stopped in order.
local function take_from(who, name, its_bodies, its_list, is_known)
    local acks, ahead = acks_of(who, name), ahead_of(who, name)
    local ids = {}
    for _, id in ipairs(redis.call("smembers", acks)) do
        if redis.call("hexists", its_bodies, id) == 1 then ids[#ids + 1] = id end
    end
    push_front(its_list, ids)
    for _, id in ipairs(is_known and ids or {}) do
        if redis.call("sismember", ahead, id) == 0 then redis.call("hincrby", losses, id, 1) end
    end
    if is_known and #ids > 0 then forget_some_losses() end
    pace_again(ids)
    redis.call("del", acks, ahead)
    return #ids
end

-- Was a broker not heard of for so long that its worker is dead?
--
-- Dramatiq's consumers say nothing while their worker is busy, so more is waited for before one is taken for dead.
local function is_ours(who) return string.sub(who, 1, 12) == "asyncworker-" end

local function is_silent(who, heard_at, at, timeout, plain_timeout)
    return tonumber(heard_at) <= at - (is_ours(who) and timeout or plain_timeout)
end

local function is_dead_since(id, died)
    return tonumber(redis.call("zscore", dead, id) or -1) == tonumber(died)
end

local function drop_bodies(its_bodies, ids)
    if #ids > 0 then
        redis.call("hdel", its_bodies, unpack(ids))
        redis.call("hdel", losses, unpack(ids))
    end
    for _, id in ipairs(ids) do
        if is_unique(id) then let_go(id) end
    end
    unpace(ids)
    return #ids
end

-- The id of the message that holds a key: one that waits, is delayed or runs. What ended in a way that no one told here
-- holds nothing, so no key is locked for ever.
local function holder_of(key)
    local lock = redis.call("hget", unique, "k." .. key)
    local id, message = string.match(lock or "", "^(%S+) (.*)$")
    if not id then return nil end
    local is_there = redis.call("hexists", bodies, id) == 1 or redis.call("hexists", delayed_bodies, id) == 1
    return is_there and message or nil
end

-- send_unique(slot, kept_ms, follows, id, body, key, message id, id, body, key, message id, ...): sends as `send` does,
-- but for messages whose key another one holds. Answers with that one's message id for each, or an empty text where it
-- was enqueued; where the key is empty, it always is.
--
-- `follows` is 1 for what a worker sends after an attempt: the retry of a message takes its key over.
function commands.send_unique(slot, kept_ms, follows, ...)
    local given, first = {...}, ...
    local memory = namespace .. ":__sent__." .. broker .. "." .. slot
    local sent = redis.call("get", memory)
    if sent and string.sub(sent, 1, #first + 1) == first .. " " then
        return cjson.decode(string.sub(sent, #first + 2))
    end
    local answer, new, locks, holders = {}, {}, {}, {}
    for i = 1, #given, 4 do
        local id, body, key, message = unpack(given, i, i + 3)
        local holder = key ~= "" and (holders[key] or holder_of(key)) or nil
        if holder and not (follows == "1" and holder == message) then
            answer[#answer + 1] = holder
        else
            answer[#answer + 1] = ""
            new[#new + 1] = id
            new[#new + 1] = body
            if key ~= "" then
                holders[key] = message
                for _, word in ipairs({"k." .. key, id .. " " .. message, id, message .. "\n" .. key}) do
                    locks[#locks + 1] = word
                end
            end
        end
    end
    if #new > 0 then enqueue(unpack(new)) end
    if #locks > 0 then redis.call("hset", unique, unpack(locks)) end
    redis.call("set", memory, first .. " " .. cjson.encode(answer), "PX", kept_ms)
    return answer
end

-- ring(): serves what is due, and wakes one consumer for it. Answers in how many ms the next line is due, or -1: who is
-- busy then hears of it by no fetch.
function commands.ring()
    local at = now()
    though_full()
    ingest(at)
    release(at)
    admit()
    if redis.call("llen", waiting) > 0 and redis.call("llen", wake) == 0 then wake_one() end
    return next_pace()
end

-- defer(id, key, window, body): what this broker's worker has fetched waits in the line of a key, where it was before,
-- or as the last. Answers 0 when it was not this broker's, and another sees to it.
function commands.defer(id, key, window, body)
    if redis.call("sismember", acks_of(broker, canonical), id) == 0 then
        return paces().is_waiting(member_of(id)) and 1 or 0  -- said again, as the answer was lost on the way?
    end
    though_full()
    redis.call("hset", bodies, id, body)
    paces().back(key, member_of(id), tonumber(window))
    redis.call("srem", acks_of(broker, canonical), id)
    redis.call("srem", ahead_of(broker, canonical), id)
    admit()
    if redis.call("llen", waiting) > 0 then wake_other(canonical) end
    return 1
end

-- rewrite(id, body): another body for what this broker has fetched; answers as ack.
function commands.rewrite(id, body)
    if redis.call("sismember", acks_of(broker, queue), id) == 0 then return 0 end
    though_full()
    redis.call("hset", own_bodies, id, body)
    return 1
end

-- reclaim(id, ...): puts back what this broker's worker holds here beside these, and does not know of.
function commands.reclaim(...)
    local known, lost = {}, {}
    for _, id in ipairs({...}) do known[id] = true end
    for _, id in ipairs(redis.call("smembers", acks_of(broker, queue))) do
        if not known[id] then lost[#lost + 1] = id end
    end
    though_full()
    return put_back(lost)
end

-- retry(old id, id, body, key, message id): an attempt has failed, and its message takes another one's place: the next
-- attempt is enqueued and this one acknowledged in one step. Between two steps a worker can be killed, and then the
-- attempt would be run again beside the next one, which would each have a next one of their own. Answers 0 when this
-- broker does not hold the old one: another has it, and sees to what follows.
--
-- A key is taken over, unless another message has it by now, which nothing follows then.
function commands.retry(old, id, body, key, message)
    if redis.call("sismember", acks_of(broker, canonical), old) == 0 then
        -- Said again, as the answer was lost on the way?
        local is_there = redis.call("hexists", bodies, id) == 1 or redis.call("hexists", delayed_bodies, id) == 1
        return is_there and 1 or 0
    end
    though_full()
    local holder = key ~= "" and holder_of(key) or message
    if holder == message then
        enqueue(id, body)
        if key ~= "" then redis.call("hset", unique, "k." .. key, id .. " " .. message, id, message .. "\n" .. key) end
    end
    redis.call("srem", acks_of(broker, canonical), old)
    redis.call("hdel", bodies, old)
    redis.call("hdel", losses, old)
    if is_unique(old) then let_go(old) end
    unpace({old})
    return 1
end

-- requeue(id, ...): what was fetched and not begun, back to the front.
function commands.requeue(...)
    local ids = {}
    for _, id in ipairs({...}) do
        if redis.call("sismember", acks_of(broker, queue), id) == 1 then ids[#ids + 1] = id end
    end
    though_full()
    put_back(ids)
end

-- Notes that workers can reach the store; true when none could for long, and for the heartbeat timeout from then on.
--
-- Whoever is the first to come back cannot know who else is alive, even if it was never here before: everyone gets the
-- time to be heard. What is written at other times does not count here, since a fetch may come before the first beat.
local function was_away(at, timeout)
    local last = redis.call("get", beat)
    redis.call("set", beat, at)
    if last and at - last > timeout / 2 then
        redis.call("set", away, 1, "PX", timeout)
    end
    return redis.call("exists", away) == 1
end

-- recover(timeout, timeout of Dramatiq's own brokers, ttl of dead letters): how many messages came back.
function commands.recover(timeout, plain_timeout, dead_ttl)
    local at = now()
    though_full()
    heard_of(at)
    redis.call("zadd", consumed, at, canonical)
    -- Who has left has said so, and who died was seen; who is only silent may be alive while the store was away.
    local latest = was_away(at, timeout) and DIED or at - timeout
    local recovered = 0
    for _, who in ipairs(redis.call("zrangebyscore", heartbeats, "-inf", latest)) do
        local heard_at = redis.call("zscore", heartbeats, who)
        if is_silent(who, heard_at, at, timeout, plain_timeout) then
            local is_known = is_ours(who) and tonumber(heard_at) ~= LEFT
            recovered = recovered + take_from(who, canonical, bodies, waiting, is_known)
            recovered = recovered + take_from(who, canonical .. ".DQ", delayed_bodies, delayed)
            if #redis.call("keys", acks_of(who, "*")) == 0 then redis.call("zrem", heartbeats, who) end
        end
    end
    if recovered > 0 then wake_one() end
    local old = redis.call("zrangebyscore", dead, "-inf", at - dead_ttl, "LIMIT", 0, DUE_AT_ONCE)
    for _, id in ipairs(old) do
        redis.call("zrem", dead, id)
        redis.call("hdel", dead_bodies, id)
        if is_unique(id) then let_go(id) end
    end
    return recovered
end

-- leave(): this broker's worker has stopped; what it still holds is recovered by others at once.
function commands.leave()
    though_full()
    redis.call("zadd", heartbeats, "XX", LEFT, broker)
end

-- bury(places, where it lived, who): the process of a broker's worker is known to be dead; what it holds is recovered
-- at once.
function commands.bury(places, place, who)
    if redis.call("hget", places, who) ~= place then return end
    though_full()
    local heard_at = redis.call("zscore", heartbeats, who)
    if heard_at and tonumber(heard_at) > DIED then redis.call("zadd", heartbeats, "XX", DIED, who) end
    redis.call("hdel", places, who)
end

function commands.purge()
    paces().purge(canonical)
    redis.call("del", waiting, bodies, delayed, delayed_bodies, due, wake, dead, dead_bodies, losses, unique,
        acks_of(broker, canonical), acks_of(broker, canonical .. ".DQ"), ahead_of(broker, canonical))
end

-- The broker whose worker has fetched an id, under the queue's name or that of its delayed messages; else nil.
local function fetched_by(id)
    for _, who in ipairs(redis.call("zrange", heartbeats, 0, -1)) do
        for _, name in ipairs({canonical, canonical .. ".DQ"}) do
            if redis.call("sismember", acks_of(who, name), id) == 1 then return who, name end
        end
    end
end

-- cancel(id, timeout, timeout of Dramatiq's own brokers): drops a message, unless a living worker has it. Answers with
-- where it was: "waiting", "delayed", "lost" (a dead worker had it), "running" (a living one has it, and it was not
-- dropped), "dead" or "gone".
function commands.cancel(id, timeout, plain_timeout)
    though_full()
    local where, its_bodies = nil, bodies
    if redis.call("hexists", delayed_bodies, id) == 1 then
        if redis.call("zrem", due, id) + redis.call("lrem", delayed, 1, id) > 0 then where = "delayed" end
        its_bodies = delayed_bodies
    elseif redis.call("hexists", bodies, id) == 0 then
        return redis.call("hexists", dead_bodies, id) == 1 and "dead" or "gone"
    elseif redis.call("lrem", waiting, 1, id) > 0 or is_pacing() and paces().is_waiting(member_of(id)) then
        where = "waiting"
    end
    if not where then
        local who, name = fetched_by(id)
        local heard_at = who and redis.call("zscore", heartbeats, who)
        if who and not is_silent(who, heard_at, now(), timeout, plain_timeout) then
            return "running"
        end
        if who then redis.call("srem", acks_of(who, name), id) end
        where = "lost"
    end
    drop_bodies(its_bodies, {id})
    return where
end

-- qsize(): everything of the queue that is not acknowledged, delayed messages too.
function commands.qsize()
    return redis.call("hlen", bodies) + redis.call("hlen", delayed_bodies)
end

-- pause(): {1 when it was not paused before, since when it is}.
function commands.pause()
    though_full()
    local new = redis.call("set", paused, now(), "NX") and 1 or 0
    redis.call("del", wake)
    return {new, redis.call("get", paused)}
end

-- resume(): 1 when it was paused. The first consumer that is woken wakes the next, as long as there is something.
function commands.resume()
    local was_paused = redis.call("del", paused)
    wake_one()
    return was_paused
end

-- overview(timeout, timeout of Dramatiq's own brokers):
-- {now, paused since or false, waiting, delayed, running, lost, dead letters, body of the first that waits or false}
--
-- `lost` is what dead workers hold that no one has taken back yet.
function commands.overview(timeout, plain_timeout)
    local at, running, lost = now(), 0, 0
    local heard = redis.call("zrange", heartbeats, 0, -1, "WITHSCORES")
    for i = 1, #heard, 2 do
        local who = heard[i]
        local held = redis.call("scard", acks_of(who, canonical)) + redis.call("scard", acks_of(who, canonical .. ".DQ"))
        if is_silent(who, heard[i + 1], at, timeout, plain_timeout) then
            lost = lost + held
        else
            running = running + held
        end
    end
    local first = redis.call("lindex", waiting, 0)
    return {
        at, redis.call("get", paused), redis.call("llen", waiting) + paces().waiting(canonical),
        redis.call("llen", delayed) + redis.call("zcard", due), running, lost, redis.call("zcard", dead),
        first and redis.call("hget", bodies, first),
    }
end

-- drop_waiting(most): drops from the front of what waits; returns how many. The others likewise.
function commands.drop_waiting(most)
    local ids = redis.call("lpop", waiting, tonumber(most)) or {}
    if #ids == 0 then
        for i, member in ipairs(paces().who_waits(canonical, tonumber(most))) do
            ids[i] = string.sub(member, #canonical + 2)
        end
    end
    return drop_bodies(bodies, ids)
end

function commands.drop_delayed(most)
    local ids = redis.call("lpop", delayed, tonumber(most)) or {}
    if #ids == 0 then
        ids = redis.call("zrange", due, 0, most - 1)
        if #ids > 0 then redis.call("zrem", due, unpack(ids)) end
    end
    return drop_bodies(delayed_bodies, ids)
end

function commands.drop_dead(most)
    local ids = redis.call("zrange", dead, 0, most - 1)
    if #ids > 0 then redis.call("zrem", dead, unpack(ids)) end
    return drop_bodies(dead_bodies, ids)
end

-- letters(latest, earliest, skipped, most): {id, died, body or false, id, died, ...}, the latest first.
function commands.letters(latest, earliest, skipped, most)
    local found = redis.call("zrevrangebyscore", dead, latest, earliest, "WITHSCORES", "LIMIT", skipped, most)
    local answer = {}
    for i = 1, #found, 2 do
        answer[#answer + 1] = found[i]
        answer[#answer + 1] = found[i + 1]
        answer[#answer + 1] = redis.call("hget", dead_bodies, found[i])
    end
    return answer
end

-- A unique message that comes back from the dead letters takes its key again, unless another one has it meanwhile.
local function take_again(id)
    local message, key = string.match(redis.call("hget", unique, id) or "", "^([^\n]*)\n(.*)$")
    if key and not holder_of(key) then redis.call("hset", unique, "k." .. key, id .. " " .. message) end
end

-- revive(id, died, body, id, died, body, ...): dead letters back into their queue, each with this body; returns a 1
-- for each that was still there as it had died then, a 0 for each that was not.
function commands.revive(...)
    local given, answer, back = {...}, {}, 0
    though_full()
    for i = 1, #given, 3 do
        local id, died, body = given[i], given[i + 1], given[i + 2]
        local is_there = is_dead_since(id, died)
        if is_there then
            redis.call("hset", bodies, id, body)
            redis.call("rpush", waiting, id)
            redis.call("zrem", dead, id)
            redis.call("hdel", dead_bodies, id)
            if is_unique(id) then take_again(id) end
            back = back + 1
        end
        answer[#answer + 1] = is_there and 1 or 0
    end
    if back > 0 then wake_one() end
    return answer
end

-- discard(id, died, id, died, ...): drops dead letters; answers as revive.
function commands.discard(...)
    local given, answer = {...}, {}
    for i = 1, #given, 2 do
        local is_there = is_dead_since(given[i], given[i + 1])
        if is_there then
            redis.call("zrem", dead, given[i])
            redis.call("hdel", dead_bodies, given[i])
            if is_unique(given[i]) then let_go(given[i]) end
        end
        answer[#answer + 1] = is_there and 1 or 0
    end
    return answer
end

return commands[command](unpack(ARGV, 4))
