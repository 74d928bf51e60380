-- Replaces the row of an attempt: KEYS = {list of the message's rows}, ARGV = {its place there from 0, text, how long rows
-- are kept in ms}. Nothing happens where it is forgotten, or lost: its worker was frozen, and another has taken it over.

local row = redis.call("lindex", KEYS[1], ARGV[1])
if not row or row == "" or string.find(row, '"outcome":"lost"', 1, true) then return end
redis.call("lset", KEYS[1], ARGV[1], ARGV[2])
redis.call("pexpire", KEYS[1], ARGV[3])
