from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncworker.errors import PathRefused, RefusedMessage, UrlRefused
from asyncworker.guard import checked_output_path, checked_url, masked, write_output

WEB = ("http", "https")


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com",
        "http://example.com:8080/a/b?c=d&e=%20#f",
        "HTTPS://EXAMPLE.COM/",
        "http://[2001:db8::1]:8080/",
        "http://user:secret@example.com/",
        "https://medium.com/@someone/post",
        "https://fa.wikipedia.org/wiki/می‌خواهم",
        "https://bücher.example/ä?ö=ü",
        r"https://example.com/search?q=a\b",
    ],
)
def test_a_web_url_is_returned_as_it_is(url: str) -> None:
    assert checked_url(url, schemes=WEB) == url


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (None, "is a string, not NoneType"),
        (7, "is a string, not int"),
        (["https://example.com"], "is a string, not list"),
        ("", "no scheme"),
        ("example.com", "no scheme"),
        ("//example.com/", "no scheme"),
        ("example.com:8080/", "scheme 'example.com' is not among"),
        ("file:///etc/passwd", "scheme 'file' is not among the allowed ones (http, https)"),
        ("javascript:alert(1)", "scheme 'javascript'"),
        ("chrome://crash", "scheme 'chrome'"),
        ("about:blank", "scheme 'about'"),
        ("view-source:http://example.com", "scheme 'view-source'"),
        ("http://", "names no host"),
        ("http:///path", "names no host"),
        ("http:example.com", "names no host"),
        ("https://:8080/", "names no host"),
        ("http://[::1/", "does not parse"),
        ("http://example.com:port/", "does not parse"),
        ("http://example.com:99999/", "does not parse"),
        ("https://example.com/a b", "the character ' '"),
        (" https://example.com/", "the character ' '"),
        ("https://example.com/\n", r"the character '\n'"),
        ("https://exa\tmple.com/", r"the character '\t'"),
        ("https://example.com/\x00", r"the character '\x00'"),
        ("https://example.com/\u3000", r"the character '\u3000'"),
        ("https://example.com/\ud800", r"the character '\ud800'"),
        ("http://127.0.0.1\\@example.com/", "backslash"),
    ],
)
def test_what_is_no_url_to_open_is_refused_with_the_reason(url: object, reason: str) -> None:
    with pytest.raises(UrlRefused) as caught:
        checked_url(url, schemes=WEB)
    assert reason in str(caught.value)
    str(caught.value).encode()  # fit for any log


def test_an_allowed_scheme_is_opened_and_the_error_names_the_setting() -> None:
    assert checked_url("file:///tmp/a.html", schemes=(*WEB, "FILE")) == "file:///tmp/a.html"
    with pytest.raises(UrlRefused, match="ASYNCWORKER_ALLOWED_SCHEMES"):
        checked_url("http://example.com/", schemes=("https",))


@pytest.mark.parametrize(
    "url",
    [
        "ftp://user:hunter2@example.com/",
        "http://user:hunter2@example.com:port/",
        "http://user:hun/ter2@example.com/",
        "http://user:hunter2@example.com/a b",
        "http://user:hunter2@[::1/",
        "http://user:hunter2@",
        "user:hunter2@example.com",
        "https:user:hunter2@example.com",
        "http://user:hunter2@e\uff0fxample.com/",
    ],
)
def test_no_error_shows_a_password(url: str) -> None:
    with pytest.raises(UrlRefused) as caught:
        checked_url(url, schemes=WEB)
    assert "ter2" not in str(caught.value)
    assert "ter2" not in (caught.value.url or "")


def test_masking_leaves_the_rest_of_a_url_alone_and_shortens_what_is_endless() -> None:
    assert masked("https://u:p@example.com/@you?a=b@c") == "https://***@example.com/@you?a=b@c"
    assert masked("https://example.com/@you") == "https://example.com/@you"
    assert len(masked("data:text/html," + "a" * 5_000_000)) == 201


@given(st.one_of(st.text(), st.integers(), st.none(), st.text().map(lambda text: f"http://{text}")))
def test_any_value_is_either_returned_or_refused(value: object) -> None:
    with contextlib.suppress(RefusedMessage):
        assert checked_url(value, schemes=WEB) == value


@pytest.mark.parametrize("path", ["a.png", "shots/2024/a.png", "./a.png", "a..png", ".hidden", "ä/雪.png"])
def test_a_relative_path_lies_below_the_output_directory(tmp_path: Path, path: str) -> None:
    output = tmp_path / "not" / "there" / "yet"
    target = checked_output_path(path, output_dir=output)
    assert target == output / path
    assert target.parent.is_dir()
    assert not target.exists()


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        (None, "is a string, not NoneType"),
        (3, "is a string, not int"),
        (b"a.png", "is a string, not bytes"),
        ("", "names no file"),
        (".", "names no file"),
        ("./", "names no file"),
        ("shots/", "names no file"),
        ("/etc/passwd", "absolute"),
        ("//etc/passwd", "absolute"),
        ("..", "`..`"),
        ("../a.png", "`..`"),
        ("a/../../b.png", "`..`"),
        ("a/..", "`..`"),
        ("a\0.png", "NUL"),
        ("\ud800.png", "surrogate"),
        ("a" * 300, "too long"),
        ("a" * 300 + "/b.png", "too long"),
    ],
)
def test_a_path_that_is_not_below_it_is_refused_and_nothing_is_written(
    tmp_path: Path, path: object, reason: str
) -> None:
    output = tmp_path / "output"
    with pytest.raises(PathRefused) as caught:
        write_output(path, b"data", output_dir=output)
    assert reason in str(caught.value)
    assert [found for found in tmp_path.rglob("*") if found != output] == []


def test_an_absolute_path_is_refused_even_inside_the_output_directory(tmp_path: Path) -> None:
    with pytest.raises(PathRefused, match="absolute"):
        checked_output_path(str(tmp_path / "a.png"), output_dir=tmp_path)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """An output directory with a neighbour that nothing may be written to."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "output").mkdir()
    return tmp_path / "output"


def test_a_symlinked_directory_that_leads_out_is_refused(output: Path) -> None:
    (output / "link").symlink_to(output.parent / "outside")
    (output / "dangling").symlink_to(output.parent / "outside" / "new")
    for path in ("link/a.png", "link/deeper/a.png", "dangling/a.png"):
        with pytest.raises(PathRefused, match="symlink leads it out"):
            write_output(path, b"data", output_dir=output)
    assert list((output.parent / "outside").iterdir()) == []


def test_a_symlinked_directory_that_stays_inside_is_used(output: Path) -> None:
    (output / "2024").mkdir()
    (output / "today").symlink_to("2024")
    assert write_output("today/a.png", b"data", output_dir=output) == output / "2024" / "a.png"
    assert (output / "2024" / "a.png").read_bytes() == b"data"


def test_symlinks_in_a_circle_are_refused(output: Path) -> None:
    (output / "a").symlink_to("b")
    (output / "b").symlink_to("a")
    with pytest.raises(PathRefused, match="symlink"):
        checked_output_path("a/x.png", output_dir=output)


@pytest.mark.parametrize("there", [True, False])
def test_a_symlink_in_the_files_place_is_refused_and_not_followed(output: Path, there: bool) -> None:
    outside = output.parent / "outside" / "secret"
    if there:
        outside.write_text("before")
    (output / "a.png").symlink_to(outside)
    with pytest.raises(PathRefused, match="symlink is in its place"):
        write_output("a.png", b"data", output_dir=output)
    assert outside.read_text() == "before" if there else not outside.exists()


def test_a_directory_swapped_for_a_symlink_after_the_check_is_not_followed(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checked_output_path

    def swapped_after(path: object, *, output_dir: Path) -> Path:
        target = real(path, output_dir=output_dir)
        (output / "shots").rmdir()
        (output / "shots").symlink_to(output.parent / "outside")
        return target

    monkeypatch.setattr("asyncworker.guard.checked_output_path", swapped_after)
    with pytest.raises(PathRefused):
        write_output("shots/a.png", b"data", output_dir=output)
    assert list((output.parent / "outside").iterdir()) == []


def test_a_symlink_put_in_the_files_place_after_the_check_is_replaced_not_followed(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = output.parent / "outside" / "secret"
    outside.write_text("before")
    real = checked_output_path

    def linked_after(path: object, *, output_dir: Path) -> Path:
        target = real(path, output_dir=output_dir)
        target.symlink_to(outside)
        return target

    monkeypatch.setattr("asyncworker.guard.checked_output_path", linked_after)
    target = write_output("a.png", b"data", output_dir=output)
    assert not target.is_symlink()
    assert target.read_bytes() == b"data"
    assert outside.read_text() == "before"


def test_a_file_or_a_directory_in_the_way_is_the_paths_fault(output: Path) -> None:
    (output / "file").write_text("")
    (output / "directory").mkdir()
    for path in ("file/a.png", "file/deeper/a.png"):
        with pytest.raises(PathRefused, match="a file is where it needs a directory"):
            write_output(path, b"data", output_dir=output)
    with pytest.raises(PathRefused, match="a directory is in its place"):
        write_output("directory", b"data", output_dir=output)


def test_a_file_is_replaced_whole_and_no_unfinished_one_stays(output: Path) -> None:
    write_output("a.png", b"a long first version", output_dir=output)
    assert write_output("a.png", b"second", output_dir=output).read_bytes() == b"second"
    assert [found.name for found in output.iterdir()] == ["a.png"]


def test_a_failed_write_leaves_the_old_file_and_no_unfinished_one(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_output("a.png", b"first", output_dir=output)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("asyncworker.guard.os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_output("a.png", b"second", output_dir=output)
    assert [found.name for found in output.iterdir()] == ["a.png"]
    assert (output / "a.png").read_bytes() == b"first"


def test_writing_leaves_no_descriptor_open(output: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(20):
        write_output(f"deep/er/{number}.png", b"data", output_dir=output)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_an_output_directory_may_itself_be_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "output").symlink_to("disk")
    assert write_output("a/b.png", b"data", output_dir=tmp_path / "output") == tmp_path / "disk" / "a" / "b.png"
