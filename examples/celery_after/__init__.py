"""The tasks of examples/celery_before as actors, as `asyncworker celery port tasks.py` prints them; Celery is gone.

dramatiq asyncworker.actors -p 1 -t 2                                   in one terminal, in this folder
asyncworker send tasks.title https://example.com --seed 42 --wait       in another
"""
