"""A stand-in engine for the real client of invisible_playwright: what it can do, and cannot, is said in engine.py."""

from tests.standin.tree import Standin, build_tree

__all__ = ["Standin", "build_tree"]
