-- The account of paces in the store. It stands before broker.lua, which asks it within its own steps, and before the few
-- lines by which limiter.py asks it; memory_limiter.py does the same in Python, and is tested by the same tests.
--
--   <prefix>:key:<key>     hash: the last slot's start, when it is held until and why, its terms, its counts
--   <prefix>:line:<key>    sorted set of members that wait, by their tickets: numbers in the order of arrival
--   <prefix>:out:<key>     sorted set of members that were let go and have taken no slot yet, by when they were let go
--   <prefix>:run:<key>     sorted set of members that have taken a slot and run, by when they took it
--   <prefix>:members       hash of member to "<state> <ticket> <since> <key>"; state: w waits, o is out, r runs
--   <prefix>:due           sorted set of keys with a line by when its head may be let go
--   <prefix>:keys          sorted set of keys by when they were used last
--   <prefix>:waiting       hash of the first word of members to how many wait: by queue
--   <prefix>:rates         hash of a rule's name to the rate that was set at run time: "<interval> <pattern> <rate>"
--
-- A member is a message: "<queue> <id>". Times are microseconds of the store's own clock, which is the only one here.
--
-- What takes a slot is the commit alone, so whatever else goes wrong no rate is exceeded: an estimate that was wrong
-- costs a message a second wait. The state of a key outlives its line by a day; what may have been forgotten since the
-- last write to the disk, when the store was restarted, counts as used.

local function pacing(prefix, now)
    local SECOND = 1000000
    local DAY = 86400 * SECOND
    local MEMBERS, DUE = prefix .. ":members", prefix .. ":due"
    local WAITING, KEYS_USED, RATES = prefix .. ":waiting", prefix .. ":keys", prefix .. ":rates"

    local OUT_FOR = 60 * SECOND        -- who is out for longer is not waited for
    local LOOK_AGAIN = 5 * SECOND      -- at a line that waits for something to end
    local MOST_LEAD = 2 * SECOND
    local NEAR = 30000                 -- before its slot, and what it takes to come there, a line's head is let go
    local CATCH_UP = 100000            -- who is late by no more, nor by 3/4 of a slot, moves no slot after its own
    local FORGOTTEN = SECOND           -- by a store that was killed, at most
    local BACK_OFF, MOST_BACK_OFF = 5 * SECOND, 600 * SECOND
    local MOST_SLOW, GOOD_FOR_STEP = 4, 10
    local AT_ONCE = 500

    local NUMBERS = {"start", "n", "held", "lead", "window", "int", "burst", "jit", "pat", "max", "bud", "rej",
        "day", "used", "slow", "step", "good"}
    local TEXTS = {"rate", "names", "reason", "run", "seed"}
    local P, states = {}, {}

    if not now then
        local time = redis.call("time")
        now = time[1] * SECOND + time[2]
    end

    local function whole(number) return string.format("%.0f", number) end
    local function state_of(key) return prefix .. ":key:" .. key end
    local function line_of(key) return prefix .. ":line:" .. key end
    local function out_of(key) return prefix .. ":out:" .. key end
    local function run_of(key) return prefix .. ":run:" .. key end

    -- What was set at run time for one of the names that a key falls under.
    local function override(s)
        if s.names == "" or redis.call("exists", RATES) == 0 then return end
        local names = {}
        for name in string.gmatch(s.names, "[^\n]+") do names[#names + 1] = name end
        for _, set in ipairs(redis.call("hmget", RATES, unpack(names))) do
            if set then
                local interval, pattern, rate = string.match(set, "^(%d+) (%d+) (.*)$")
                s.int, s.pat, s.burst, s.rate = tonumber(interval), tonumber(pattern), 1, rate
                return
            end
        end
    end

    -- What was set, and what is still to recover after it was told to slow down, make the length of a slot.
    local function reckon(s)
        s.own_int, s.own_rate = s.int, s.rate
        override(s)
        s.slot = s.int * 2 ^ s.slow
        s.tat = s.start > 0 and s.start + s.slot or 0
        if s.day ~= math.floor(now / DAY) then s.used = 0 end
    end

    -- The state of a key as it is now; what is changed in it is written by `put`.
    local function get(key)
        local s = states[key]
        if s then return s end
        s = {key = key}
        local numbers = redis.call("hmget", state_of(key), unpack(NUMBERS))
        for i, name in ipairs(NUMBERS) do s[name] = tonumber(numbers[i] or 0) end
        local texts = redis.call("hmget", state_of(key), unpack(TEXTS))
        for i, name in ipairs(TEXTS) do s[name] = texts[i] or "" end
        s.is_known = s.burst > 0
        reckon(s)
        redis.call("zremrangebyscore", out_of(key), "-inf", "(" .. whole(now - OUT_FOR))
        redis.call("zremrangebyscore", run_of(key), "-inf", "(" .. whole(now - DAY))
        s.out, s.running = redis.call("zcard", out_of(key)), redis.call("zcard", run_of(key))
        s.waiting = redis.call("zcard", line_of(key))
        states[key] = s
        return s
    end

    local function put(s, ...)
        redis.call("hset", state_of(s.key), ...)
        redis.call("zadd", KEYS_USED, whole(now), s.key)
    end

    -- How long a state is kept: with a line, as long as that is there.
    local function keep(s)
        if s.waiting > 0 then
            redis.call("persist", state_of(s.key))
        else
            local kept = DAY + math.max(0, s.tat - now, s.held - now)
            redis.call("pexpire", state_of(s.key), whole(math.ceil(kept / 1000)))
        end
    end

    local function find(member)
        local known = redis.call("hget", MEMBERS, member)
        if not known then return end
        local state, ticket, since, key = string.match(known, "^(%a) (%d+) (%d+) (.*)$")
        return {state = state, ticket = tonumber(ticket), since = tonumber(since), key = key}
    end

    local function note(member, state, ticket, key, since)
        redis.call("hset", MEMBERS, member, state .. " " .. whole(ticket) .. " " .. whole(since or now) .. " " .. key)
    end

    -- When one more could begin, beside so many that are out; nil: not before something ends.
    local function estimate(s, out, running)
        if s.max > 0 and out + running >= s.max then return nil end
        if not s.is_known then return out == 0 and math.max(now, s.held) or nil end
        local from = math.max(now, s.held)
        local at = math.max(from, math.max(from, s.tat) + (out - s.burst + 1) * s.slot)
        if s.bud > 0 and s.rej == 0 and s.used + out >= s.bud then
            at = math.max(at, (math.floor(now / DAY) + 1) * DAY)
        end
        return at
    end

    local function is_near(s, at) return at ~= nil and at - now <= s.window + s.lead end

    -- Who waits in line is let go later than who comes may go: until its slot it would hold one of a worker.
    local function early(s) return math.min(s.window, NEAR) + s.lead end

    -- Notes when a key's line is to be looked at; each change of a key ends with this.
    local function score(s)
        keep(s)
        if s.waiting == 0 then
            redis.call("zrem", DUE, s.key)
            return
        end
        local at = estimate(s, s.out, s.running)
        redis.call("zadd", DUE, whole(at and math.max(0, at - early(s)) or now + LOOK_AGAIN), s.key)
    end

    local function take_out(s, member) s.out = s.out - redis.call("zrem", out_of(s.key), member) end
    local function take_off(s, member) s.running = s.running - redis.call("zrem", run_of(s.key), member) end

    local function let_out(s, member, ticket, since)
        note(member, "o", ticket, s.key, since)
        s.out = s.out + redis.call("zadd", out_of(s.key), whole(now), member)
    end

    local function draw_ticket(s) return redis.call("hincrby", state_of(s.key), "ticket", 1) end

    local function count_waiting(s, member, change)
        s.waiting = s.waiting + change
        if change ~= 0 then redis.call("hincrby", WAITING, string.match(member, "^%S*"), change) end
    end

    -- Has a member wait, by its ticket.
    local function enter(s, member, ticket)
        note(member, "w", ticket, s.key)
        count_waiting(s, member, redis.call("zadd", line_of(s.key), whole(ticket), member))
        redis.call("zadd", KEYS_USED, whole(now), s.key)
    end

    -- Forgets a member; what it held is free.
    function P.done(member)
        local known = find(member)
        if not known then return end
        local s = get(known.key)
        take_out(s, member)
        take_off(s, member)
        count_waiting(s, member, -redis.call("zrem", line_of(s.key), member))
        redis.call("hdel", MEMBERS, member)
        score(s)
    end

    -- How many wait whose first word is this one; and these members themselves, so many at most.
    function P.waiting(word) return tonumber(redis.call("hget", WAITING, word) or 0) end

    function P.who_waits(word, most)
        local found = {}
        for _, key in ipairs(redis.call("zrange", DUE, 0, -1)) do
            for _, member in ipairs(redis.call("zrange", line_of(key), 0, -1)) do
                if #found >= most then return found end
                if string.sub(member, 1, #word + 1) == word .. " " then found[#found + 1] = member end
            end
        end
        return found
    end

    function P.is_waiting(member)
        local known = find(member)
        return known ~= nil and known.state == "w"
    end

    -- Forgets all members whose first word is this one.
    function P.purge(word)
        for _, member in ipairs(redis.call("hkeys", MEMBERS)) do
            if string.sub(member, 1, #word + 1) == word .. " " then P.done(member) end
        end
    end

    -- arrive(key, member, window): true when it may go now, within `window` before its slot; else it waits in line.
    --
    -- Who was let go before goes, unless the key is held meanwhile; who had run, and lost its worker, has its place.
    function P.arrive(key, member, window)
        local known = find(member)
        if known and known.key ~= key then  -- through another exit
            P.done(member)
            known = nil
        end
        local s = get(key)
        if s.window ~= window then
            s.window = window
            put(s, "window", whole(window))
        end
        if known and known.state == "w" then return false end
        local ticket, is_out = known and known.ticket, known and known.state == "o"
        if known then
            take_out(s, member)
            take_off(s, member)
        end
        local goes
        if is_out then
            goes = is_near(s, estimate(s, 0, s.running))
        else
            goes = (s.waiting == 0 or ticket ~= nil) and is_near(s, estimate(s, s.out, s.running))
        end
        ticket = ticket or draw_ticket(s)
        if goes then let_out(s, member, ticket, is_out and known.since or nil) else enter(s, member, ticket) end
        score(s)
        return goes
    end

    -- The heads of a line whose time has come: {member, ticket, member, ticket, ...}
    local function heads(s, most)
        local many = 0
        while many < math.min(most, s.waiting) do
            local at = estimate(s, s.out + many, s.running)
            if not at or at - now > early(s) then break end
            many = many + 1
        end
        return many > 0 and redis.call("zrange", line_of(s.key), 0, many - 1, "WITHSCORES") or {}
    end

    -- admit(place): lets go whose time has come; `place` is called with them, in order, before they leave their line.
    function P.admit(place)
        local keys = redis.call("zrangebyscore", DUE, "-inf", whole(now), "LIMIT", 0, 100)
        local left = AT_ONCE
        for _, key in ipairs(keys) do
            local s, members = get(key), {}
            local found = heads(s, left)
            for i = 1, #found, 2 do members[#members + 1] = found[i] end
            if #members > 0 then place(members) end
            for i = 1, #found, 2 do
                let_out(s, found[i], tonumber(found[i + 1]))
                count_waiting(s, found[i], -redis.call("zrem", line_of(key), found[i]))
            end
            left = left - #members
            score(s)
        end
        return AT_ONCE - left
    end

    -- In how many microseconds a line is to be looked at; -1: there is none.
    function P.next_due()
        local first = redis.call("zrange", DUE, 0, 0, "WITHSCORES")
        return first[2] and math.max(0, first[2] - now) or -1
    end

    -- By how much of a slot the next one is later than a metronome's.
    local function jitter(s)
        if s.jit == 0 then return 0 end
        local n = s.pat > 0 and s.n % s.pat or s.n
        local drawn = redis.sha1hex(s.seed .. ":" .. s.key .. ":" .. whole(n))
        return tonumber(string.sub(drawn, 1, 8), 16) / 4294967296 * s.jit
    end

    -- A store that was started anew may not know the last slots.
    local function notice_restart(s)
        local answered, info = pcall(redis.call, "info", "server")
        local run = answered and string.match(info, "run_id:(%x+)") or ""
        if s.run ~= "" and run ~= "" and s.run ~= run and s.start > 0 then
            s.start = math.max(s.start, now) + FORGOTTEN
            s.tat = s.start + s.slot
            put(s, "start", whole(s.start), "run", run)  -- also where no slot is taken now: it is noticed once
        end
        s.run = run
    end

    local function count(s)
        local second = math.floor(now / SECOND)
        local field = "u" .. second % 60
        local at, many = string.match(redis.call("hget", state_of(s.key), field) or "", "^(%d+) (%d+)$")
        many = tonumber(at) == second and many + 1 or 1
        return field, whole(second) .. " " .. many
    end

    local function agree(s, window, terms)
        for i, name in ipairs({"int", "burst", "jit", "pat", "max", "bud", "rej"}) do
            s[name] = tonumber(terms[i])
        end
        s.seed, s.rate, s.names, s.window, s.is_known = terms[8], terms[9], terms[10], window, true
        reckon(s)
        put(s, "int", whole(s.own_int), "burst", terms[2], "jit", terms[3], "pat", terms[4], "max", terms[5],
            "bud", terms[6], "rej", terms[7], "seed", terms[8], "rate", terms[9], "names", terms[10],
            "window", whole(window))
    end

    -- Why a member may take no slot now, and when it might; nil: it may.
    local function refusal(s, known, member, most)
        if member ~= "" and s.waiting > 0 and not known then return "later", now end
        if member ~= "" and s.max > 0 and s.running >= s.max then return "later", now end
        if s.bud > 0 and s.used >= s.bud then
            if s.rej == 1 then return "spent", (math.floor(now / DAY) + 1) * DAY end
            return "later", (math.floor(now / DAY) + 1) * DAY
        end
        if s.held > now + most then return "later", s.held end
    end

    local function take(s, member, known, start)
        s.start, s.tat, s.n = start, start + s.slot, s.n + 1
        local day = math.floor(now / DAY)
        s.used, s.day = s.used + 1, day
        local field, counted = count(s)
        local lead = s.lead
        if known and known.state == "o" then
            lead = math.min(MOST_LEAD, math.max(0, lead + math.floor((now - known.since - lead) / 8)))
        end
        s.lead = lead
        put(s, "start", whole(start), "n", whole(s.n), "used", whole(s.used), "day", whole(day), field, counted,
            "lead", whole(lead), "run", s.run)
        if member ~= "" then
            note(member, "r", known and known.ticket or draw_ticket(s), s.key)
            s.running = s.running + redis.call("zadd", run_of(s.key), whole(now), member)
        end
    end

    -- commit(key, member, window, most, terms...): {"go" | "later" | "spent", microseconds to wait, to the next due}.
    --
    -- "go": the slot is the member's, so long from now; not longer than `most`, and what it takes to open a page. An
    -- empty member holds nothing: a further navigation.
    function P.commit(key, member, window, most, ...)
        local known = member ~= "" and find(member) or nil
        if known and known.key ~= key then
            P.done(member)
            known = nil
        end
        local s = get(key)
        agree(s, tonumber(window), {...})
        notice_restart(s)
        if known then
            take_out(s, member)
            take_off(s, member)
        end
        most = tonumber(most) + s.lead
        local verdict, at = refusal(s, known, member, most)
        local begun
        if not verdict then
            local late = math.floor(jitter(s) * s.slot)
            at = math.max(now, s.held, s.tat - (s.burst - 1) * s.slot + late)
            begun = math.max(s.tat, at - late)
            if begun - s.tat <= math.min(CATCH_UP, s.slot * 0.75) then begun = s.tat end
            verdict = at - now <= most and "go" or "later"
        end
        if verdict == "go" then
            take(s, member, known, begun)
        elseif known then
            let_out(s, member, known.ticket)
        end
        score(s)
        return {verdict, whole(math.max(0, at - now)), whole(P.next_due())}
    end

    -- back(key, member, window): it has taken no slot, and waits again where it was.
    function P.back(key, member, window)
        local known = find(member)
        if known and known.key ~= key then
            P.done(member)
            known = nil
        end
        local s = get(key)
        if s.window == 0 then
            s.window = window
            put(s, "window", whole(window))
        end
        if known then
            take_out(s, member)
            take_off(s, member)
        end
        enter(s, member, known and known.ticket or draw_ticket(s))
        score(s)
    end

    -- lost(member): it is given to another, and has no slot there yet; its place is its own until then.
    function P.lost(member)
        local known = find(member)
        if not known or known.state == "w" then return end
        local s = get(known.key)
        take_out(s, member)
        take_off(s, member)
        let_out(s, member, known.ticket)
        score(s)
    end

    -- held(key): for how many microseconds a key is still held.
    function P.held(key) return whole(math.max(0, get(key).held - now)) end

    -- hold(key, until, for, slows, reason): {held until, steps of the back-off}. Where neither time is given (0) it is
    -- a back-off, longer with each. A hold never ends one that lasts longer.
    function P.hold(key, until_, for_, slows, reason)
        local s = get(key)
        local ends = tonumber(until_)
        if tonumber(for_) > 0 then ends = now + for_ end
        if ends == 0 then
            ends = now + math.min(MOST_BACK_OFF, BACK_OFF * 2 ^ s.step)
            s.step = math.min(s.step + 1, 16)
        end
        if ends > s.held then s.held, s.reason = ends, reason end
        if slows == "1" then
            s.slow, s.good = math.min(MOST_SLOW, s.slow + 1), 0
            s.slot = s.int * 2 ^ s.slow
            s.tat = s.start > 0 and s.start + s.slot or 0
        end
        put(s, "held", whole(s.held), "reason", s.reason, "step", whole(s.step), "slow", whole(s.slow),
            "good", whole(s.good))
        score(s)
        return {whole(s.held), s.step}
    end

    -- told(key, for, reason): a site says to slow down. For how many microseconds the key is held then; "0" where it was
    -- held already: of those who were on their way together the first one counts, and a later one makes it longer at most.
    function P.told(key, for_, reason)
        local s = get(key)
        if s.held <= now then
            P.hold(key, "0", for_, "1", reason)
            return whole(s.held - now)
        end
        if tonumber(for_) > 0 then P.hold(key, "0", for_, "0", reason) end
        return "0"
    end

    -- free(key): ends a hold, and all that is left of the back-off.
    function P.free(key)
        local s = get(key)
        s.held, s.step, s.slow, s.good = 0, 0, 0, 0
        s.slot = s.int
        s.tat = s.start > 0 and s.start + s.slot or 0
        put(s, "held", 0, "reason", "", "step", 0, "slow", 0, "good", 0)
        score(s)
    end

    -- succeeded(key): how many steps the rate is still below its own, each of which halves it.
    function P.succeeded(key)
        local s = get(key)
        if s.slow == 0 and s.step == 0 or s.held > now then return s.slow end
        s.good = s.good + 1
        if s.good >= GOOD_FOR_STEP then
            s.good, s.slow, s.step = 0, math.max(0, s.slow - 1), math.max(0, s.step - 1)
            s.slot = s.int * 2 ^ s.slow
            s.tat = s.start > 0 and s.start + s.slot or 0
        end
        put(s, "slow", whole(s.slow), "step", whole(s.step), "good", whole(s.good))
        score(s)
        return s.slow
    end

    -- set_rate(name, interval, pattern, rate): for all keys that fall under a name; an empty rate: their own again.
    function P.set_rate(name, interval, pattern, rate)
        if rate == "" then
            redis.call("hdel", RATES, name)
        else
            redis.call("hset", RATES, name, interval .. " " .. pattern .. " " .. rate)
        end
        states = {}
        for _, key in ipairs(redis.call("zrange", DUE, 0, -1)) do score(get(key)) end
    end

    -- listing(): {key, rate, used in the last minute, held until, reason, waiting, out, running, used of the budget,
    -- budget, steps below its rate, key, ...}
    function P.listing()
        redis.call("zremrangebyscore", KEYS_USED, "-inf", whole(now - DAY))
        local keys, seen, answer = redis.call("zrange", KEYS_USED, 0, -1), {}, {}
        for _, key in ipairs(redis.call("zrange", DUE, 0, -1)) do keys[#keys + 1] = key end
        for _, key in ipairs(keys) do
            if not seen[key] then
                seen[key] = true
                local s, used, fields = get(key), 0, {}
                for i = 0, 59 do fields[i + 1] = "u" .. i end
                for _, counted in ipairs(redis.call("hmget", state_of(key), unpack(fields))) do
                    local at, many = string.match(counted or "", "^(%d+) (%d+)$")
                    if at and at * SECOND > now - 60 * SECOND then used = used + many end
                end
                for _, fact in ipairs({key, s.rate, used, whole(s.held > now and s.held or 0), s.reason, s.waiting,
                    s.out, s.running, s.used, s.bud, s.slow}) do
                    answer[#answer + 1] = fact
                end
            end
        end
        return answer
    end

    return P
end
