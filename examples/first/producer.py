"""Send messages from Python; run it in this folder, with a worker up."""

from actors.pages import title

message = title.send("https://example.com", seed=42)
print(message.get_result(block=True, timeout=60_000))

title.send("https://example.com")
title.send_with_options(args=("https://example.com",), kwargs={"seed": 42}, delay=500, max_retries=0)
