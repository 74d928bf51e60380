"""Each folder here is a deployment: run its commands in it.

These are packages only so that type checkers can tell their `actors` apart.
"""
