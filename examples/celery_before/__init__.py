"""Three browser tasks on Celery, as people have them: each worker process has a browser, which a signal starts.

celery -A tasks worker -c 1                                             in one terminal, in this folder
celery -A tasks call tasks.title -a '["https://example.com"]'           in another

A Redis server is needed on this machine, and what `playwright install chromium` gets, or the file of a Chromium in
ASYNCWORKER_EXECUTABLE_PATH: `asyncworker doctor` says where one is.
"""
