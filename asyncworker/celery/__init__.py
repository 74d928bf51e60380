"""Celery's tasks on asyncworker's workers, and the way from one to the other; needs the extra `asyncworker[celery]`."""
