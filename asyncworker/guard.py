"""What a message may make a worker open and write: it comes from a queue and is not trusted.

`checked_url` judges a URL by its text, `private_hosts.deny_private` where it leads, `write_output` where a file
goes. The shipped actors call all three; an actor of your own that takes URLs or paths from its message can, too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from asyncworker.errors import PathRefused, UrlRefused

_LONGEST_SHOWN = 200


def masked(url: str) -> str:
    """The URL as an error or a log line may show it: without credentials, and not endless."""
    userinfo = r"[^/?#]*@"
    try:
        _ = urlsplit(url).port
    except ValueError:
        userinfo = r".*@"  # a password with a raw slash in it, say
    shown = re.sub(rf"^([^/?#]*//)?{userinfo}", r"\1***@", url, count=1, flags=re.DOTALL)
    return shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}…"


def checked_url(url: object, *, schemes: Sequence[str]) -> str:
    """Return `url` when it is one that this deployment opens, judged by its text alone.

    Parameters:
        url: What the message says.
        schemes: The allowed schemes, as in ASYNCWORKER_ALLOWED_SCHEMES.

    Raises:
        UrlRefused: When it is no string, does not parse, has another scheme, or http without a host. Its text
            never shows credentials, which are allowed.
    """
    if not isinstance(url, str):
        raise UrlRefused(f"a URL is a string, not {type(url).__name__}; correct what sends the message")
    if (problem := _problem(url, schemes)) is not None:
        raise UrlRefused(f"{masked(url)!r} is not opened: {problem}", url=masked(url))
    return url


def _problem(url: str, schemes: Sequence[str]) -> str | None:
    """Why a URL is not opened, and what to do; None: nothing is wrong with its text."""
    for character in url:
        # Cc: control, Cs: half a surrogate pair, Z: any space. Browsers drop or encode them, each its own way.
        if unicodedata.category(character) in ("Cc", "Cs", "Zs", "Zl", "Zp"):
            return f"it contains the character {character!a}; percent-encode it or take it out"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port  # both may raise
    except ValueError:  # its text is left out: it quotes the password
        return "its host or port does not parse; correct it"
    if not parts.scheme:
        return "it has no scheme; write it whole, such as https://example.com/"
    if parts.scheme not in [scheme.lower() for scheme in schemes]:
        return (
            f"the scheme {parts.scheme!r} is not among the allowed ones ({', '.join(schemes)}); "
            "ASYNCWORKER_ALLOWED_SCHEMES can add it"
        )
    if parts.scheme in ("http", "https") and not host:
        return "it names no host; write it whole, such as https://example.com/"
    if "\\" in parts.netloc:
        return "its host contains a backslash, which browsers read as a slash; correct it"
    return None


def checked_output_path(path: object, *, output_dir: Path) -> Path:
    """Return where a file of that name lies below the output directory; its directory is made when missing.

    Parameters:
        path: What the message says: relative, without `..`, and not led out by a symlink.
        output_dir: ASYNCWORKER_OUTPUT_DIR.

    Raises:
        PathRefused: For any other path, and for one whose place is taken by a directory or a symlink.

    Whoever writes there by the returned name alone can still be fooled by a symlink that is put there in
    between; `write_output` cannot.
    """
    parts = _checked_parts(path)
    output_dir.mkdir(parents=True, exist_ok=True)
    root = output_dir.resolve()
    with _refusing(path):
        directory = root.joinpath(*parts[:-1]).resolve()
        if not directory.is_relative_to(root):
            raise _path_refused(path, "a symlink leads it out of ASYNCWORKER_OUTPUT_DIR")
        directory.mkdir(parents=True, exist_ok=True)
        target = directory / parts[-1]
        if target.is_symlink():
            raise _path_refused(path, "a symlink is in its place")
        if target.is_dir():
            raise _path_refused(path, "a directory is in its place")
    return target


def write_output(path: object, data: bytes, *, output_dir: Path) -> Path:
    """Write a file below the output directory, whole or not at all, and return where. Blocks: use a thread.

    No symlink is followed, also none that appears meanwhile: the directory is opened step by step, and the
    file gets its name when it is complete. An older file of that name is replaced, as on a retry.

    Raises:
        PathRefused: As `checked_output_path` does.
        OSError: When the disk is full or the directory cannot be written.
    """
    target = checked_output_path(path, output_dir=output_dir)
    with _refusing(path), _directory(target.parent, below=output_dir.resolve()) as directory:
        unfinished = f".{secrets.token_hex(8)}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        # The usual mode: what others may read is the umask's to say.
        descriptor = os.open(unfinished, flags, 0o666, dir_fd=directory)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(unfinished, target.name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            os.unlink(unfinished, dir_fd=directory)
            raise
    return target


def _checked_parts(path: object) -> tuple[str, ...]:
    if not isinstance(path, str):
        raise _path_refused(path, f"a path is a string, not {type(path).__name__}")
    if "\0" in path:
        raise _path_refused(path, "it contains a NUL character")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise _path_refused(path, "it contains half a character (a lone surrogate)") from None
    if path.startswith("/"):
        raise _path_refused(path, "it is absolute")
    parts = Path(path).parts
    if ".." in parts:
        raise _path_refused(path, "it contains `..`")
    if not parts or path.endswith(("/", "/.")):
        raise _path_refused(path, "it names no file")
    return parts


def _path_refused(path: object, reason: str) -> PathRefused:
    shown = ascii(path)
    if len(shown) > _LONGEST_SHOWN:
        shown = f"{shown[:_LONGEST_SHOWN]}…"
    return PathRefused(f"nothing is written to {shown}: {reason}; give a relative path such as shots/1.png", path=shown)


#: What a path itself can be to blame for; a full disk or a directory that cannot be written are not its fault.
_PATH_FAULTS = {
    errno.ENAMETOOLONG: "a name in it is too long",
    errno.ENOTDIR: "a file is where it needs a directory",
    errno.EEXIST: "a file is where it needs a directory",
    errno.EISDIR: "a directory is in its place",
    errno.ELOOP: "a symlink is in its way",
}


@contextlib.contextmanager
def _refusing(path: object) -> Iterator[None]:
    """Turn errors that the path is to blame for into PathRefused."""
    try:
        yield
    except OSError as error:
        reason = _PATH_FAULTS.get(error.errno or 0)
        if reason is None:
            raise
        raise _path_refused(path, reason) from error
    except RuntimeError as error:  # what Path.resolve raises for symlinks in a circle, until Python 3.13
        raise _path_refused(path, _PATH_FAULTS[errno.ELOOP]) from error


@contextlib.contextmanager
def _directory(directory: Path, *, below: Path) -> Iterator[int]:
    """A descriptor of a directory below another, opened without following a symlink on the way."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(below, flags)
    try:
        for name in directory.relative_to(below).parts:
            inner = os.open(name, flags, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)
