import subprocess, os
import pytest
from tests.waiting import wait_until
def test_leaves():
    subprocess.Popen(["sh","-c","setsid sleep 12 & exit 0"]).wait()
def test_zombie():
    pid=os.fork()
    if pid==0: os._exit(0)
def test_ok(state_dir):
    from asyncworker import embedded
    embedded.ensure(state_dir)
@pytest.mark.needs_browser
def test_ok2(): pass
