-- Opens the row of an attempt: KEYS = {list of the message's rows, list of all rows in order}, ARGV = {text, how long
-- rows are kept in ms, how many of them at most, what only this attempt's text has}; returns the row's number.
--
-- Said again, since the answer was lost on the way, it finds the row: a second one would be left open for ever.
--
-- Of more rows than may be the oldest are forgotten, a thousand at once at most; broker.lua does the same.

local LATEST = 16

local length = redis.call("llen", KEYS[1])
for place, row in ipairs(redis.call("lrange", KEYS[1], -LATEST, -1)) do
    local _, last = string.find(row, ARGV[4], 1, true)
    if last and not string.find(row, "^%d", last + 1) then return math.max(0, length - LATEST) + place end
end
local number = redis.call("rpush", KEYS[1], ARGV[1])
redis.call("pexpire", KEYS[1], ARGV[2])
redis.call("rpush", KEYS[2], string.sub(KEYS[1], #KEYS[2] + 2) .. " " .. number)
redis.call("pexpire", KEYS[2], ARGV[2])
for _ = 1, math.min(1000, redis.call("llen", KEYS[2]) - tonumber(ARGV[3])) do
    local id, oldest = string.match(redis.call("lpop", KEYS[2]), "^(.*) (%d+)$")
    if id then
        local key = KEYS[2] .. ":" .. id
        if redis.call("llen", key) <= tonumber(oldest) then
            redis.call("del", key)
        else  -- the number of a row is its place, so a forgotten one leaves it empty
            redis.call("lset", key, oldest - 1, "")
        end
    end
end
return number
