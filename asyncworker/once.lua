-- What becomes of a step, each command in one step of the store; the rules stand in once.py.
--
-- KEYS = {record, set of the steps that a person may have to decide}, ARGV = {command, step, ...}. A record is a hash:
--   state      held, open, done or unknown
--   token      of the entry that holds it, held it last, or completed it: <fence>.<number>
--   fence      of the latest attempt that entered it; of that attempt's message and worker there is `message`, `worker`
--   acks, id   where the broker says that the message is its worker's; empty where that is in another store
--   until      when its lease is over; `suspected`: when someone who waits found it over, first
--   on_lost    open or unknown, as its holder said
--   at, value  of its last change; what was stored, as JSON

local record, undecided = KEYS[1], KEYS[2]
local command, step = ARGV[1], ARGV[2]

local function now()
    local time = redis.call("time")
    return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function get(name) return redis.call("hget", record, name) or nil end
local function set(...) redis.call("hset", record, "at", now(), ...) end

-- Was the message taken from the worker that asks? `acks` is empty where the store cannot know.
local function was_taken(acks, id) return acks ~= "" and redis.call("sismember", acks, id) == 0 end

local function holds(token) return get("state") == "held" and get("token") == token end

local function become_unknown()
    set("state", "unknown")
    redis.call("persist", record)
    redis.call("sadd", undecided, step)
end

local function settle(state, kept_ms, ...)
    set("state", state, ...)
    redis.call("hdel", record, "suspected")
    redis.call("pexpire", record, kept_ms)
    redis.call("srem", undecided, step)
end

-- Is what holds the step, and is not this entry, lost? A lease that is over is looked at twice: while the store was
-- away its holder could not renew it, and gets the time to do so.
local function is_lost(message, fence, lease_ms)
    if get("message") == message and tonumber(get("fence")) < fence then return true end
    if was_taken(get("acks"), get("id")) then return true end
    local at = now()
    if tonumber(get("until")) > at then return false end
    local suspected = get("suspected")
    if not suspected then redis.call("hset", record, "suspected", at) end
    return suspected and at - suspected >= lease_ms / 3
end

local commands = {}

-- enter(token, fence, message, worker, lease_ms, kept_ms, on_lost, acks, id):
-- {yours}, {stale}, {done, value}, {held, message, worker} or {unknown, message, worker, since}
function commands.enter(token, fence, message, worker, lease_ms, kept_ms, on_lost, acks, id)
    local state = get("state")
    fence = tonumber(fence)
    if state == "done" then return {"done", get("value")} end
    if was_taken(acks, id) then return {"stale"} end
    if state and get("message") == message and tonumber(get("fence")) > fence then return {"stale"} end
    if state == "held" and get("token") ~= token then
        if not is_lost(message, fence, lease_ms) then return {"held", get("message"), get("worker")} end
        if get("on_lost") == "unknown" or on_lost == "unknown" then
            become_unknown()
            state = "unknown"
        end
    end
    if state == "unknown" then
        if get("message") == message then redis.call("hset", record, "fence", ARGV[4]) end
        return {"unknown", get("message"), get("worker"), get("at")}
    end
    set("state", "held", "token", token, "fence", ARGV[4], "message", message, "worker", worker,
        "until", now() + lease_ms, "on_lost", on_lost, "acks", acks, "id", id)
    redis.call("hdel", record, "suspected", "value")
    if on_lost == "unknown" then
        redis.call("persist", record)
        redis.call("sadd", undecided, step)
    else
        redis.call("pexpire", record, kept_ms)
    end
    return {"yours"}
end

-- renew(token, lease_ms): 1 while it is this entry's.
function commands.renew(token, lease_ms)
    if not holds(token) then return 0 end
    redis.call("hset", record, "until", now() + lease_ms)
    redis.call("hdel", record, "suspected")
    return 1
end

-- confirm(token, acks, id): 1 while it is this entry's, and its message is still its worker's.
function commands.confirm(token, acks, id) return holds(token) and not was_taken(acks, id) and 1 or 0 end

-- complete(token, fence, value, kept_ms, acks, id): 1 when the step is done now, 0 for a stale attempt's.
--
-- Where the store has lost the record, no one else has it. Where someone who waited gave its holder up for lost and
-- left it to a person, but no later attempt of the message came, what the holder says is what that person wants to know.
function commands.complete(token, fence, value, kept_ms, acks, id)
    local state = get("state")
    if state == "done" and get("token") == token then return 1 end
    if was_taken(acks, id) then return 0 end
    local is_own = get("token") == token and get("fence") == fence and (state == "held" or state == "unknown")
    if state and not is_own then return 0 end
    settle("done", kept_ms, "value", value, "token", token, "fence", fence)
    return 1
end

-- leave(token, open or unknown, kept_ms): the entry ends without having completed it.
function commands.leave(token, how, kept_ms)
    if not holds(token) then return 0 end
    if how == "unknown" then become_unknown() else settle("open", kept_ms) end
    return 1
end

-- resolve(done or open, value, kept_ms): what a person has decided; 0 when there is nothing to decide.
function commands.resolve(how, value, kept_ms)
    local state = get("state")
    local is_over = state == "held" and get("on_lost") == "unknown" and tonumber(get("until")) <= now()
    if state ~= "unknown" and not is_over then return 0 end
    settle(how, kept_ms, "token", "")
    if how == "done" then redis.call("hset", record, "value", value) end
    return 1
end

return commands[command](unpack(ARGV, 3))
