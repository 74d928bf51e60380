"""The first actor of README, and a script that sends it messages.

dramatiq asyncworker.actors -p 1 -t 2        in one terminal, in this folder
python producer.py                           in another
"""
