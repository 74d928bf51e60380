"""The tasks of examples/celery_before, still on Celery, on asyncworker's workers and in their browser.

export ASYNCWORKER_CELERY_APP=tasks:app                                 in both terminals, in this folder
dramatiq asyncworker.actors -p 1 -t 1                                   in one
celery -A tasks call tasks.title -a '["https://example.com"]'           in the other

The extra `asyncworker[celery]` is needed, and no Redis server. What has changed: the app's broker and results, the
browser, which comes from asyncworker.celery, and the two signal handlers, which are gone. `title` and `price` are as
they were; `wander` has a session, which is closed by itself.
"""
