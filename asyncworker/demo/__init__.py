"""What `asyncworker demo` needs: a site of its own to work on."""
