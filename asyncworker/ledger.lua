-- Opens the row of an attempt: KEYS = {list of the message's rows, list of the messages that have rows, in order},
-- ARGV = {text, how long rows are kept in ms, of how many messages at most}; returns the row's number.
--
-- Of the oldest messages the rows are forgotten where there are more than may be; broker.lua does the same.

local number = redis.call("rpush", KEYS[1], ARGV[1])
redis.call("pexpire", KEYS[1], ARGV[2])
if number == 1 then
    redis.call("rpush", KEYS[2], KEYS[1])
    redis.call("pexpire", KEYS[2], ARGV[2])
    while redis.call("llen", KEYS[2]) > tonumber(ARGV[3]) do redis.call("del", redis.call("lpop", KEYS[2])) end
end
return number
