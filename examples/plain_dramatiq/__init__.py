"""A plain Dramatiq actor that opens a session itself, beside one that needs no browser.

dramatiq asyncworker.actors -p 1 -t 2 -Q browser      in one terminal, in this folder: has a browser
dramatiq asyncworker.actors -p 1 -t 1 -Q files        in another: never launches one
asyncworker send heading https://example.com --wait   in a third
"""
