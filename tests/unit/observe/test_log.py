from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from distill_rl.errors import ConfigError
from distill_rl.observe import log


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    logger = log.get()
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


def test_console_shows_warnings_by_default(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(log.VARIABLE, raising=False)
    log.setup_console()
    log.get("driver").info("detail")
    log.get("driver").warning("trouble")
    assert capsys.readouterr().err == "WARNING: trouble\n"


def test_variable_sets_the_level_without_duplicate_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(log.VARIABLE, "INFO")
    log.setup_console()
    log.setup_console()
    log.get("driver").info("detail")
    assert capsys.readouterr().err == "INFO: detail\n"


def test_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(log.VARIABLE, "loud")
    with pytest.raises(ConfigError, match="DISTILL_RL_LOG: must be one of debug, info, warning, error; got loud"):
        log.setup_console()


def test_log_file_gets_info_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(log.VARIABLE, raising=False)
    with log.log_file(tmp_path / "logs" / "driver.log") as path:
        log.get("driver").info("step 1 of %d", 10)
        log.get("driver").debug("too much")
    log.get("driver").warning("after the run")
    (line,) = path.read_text().splitlines()
    assert line.endswith("INFO distill_rl.driver: step 1 of 10")


def test_a_log_on_a_full_disk_does_not_hide_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with log.log_file("/dev/full"):
            log.get("driver").warning("lost")
            raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause"):
        fail()
    assert "Logging error" not in capsys.readouterr().err


def test_tracebacks_are_indented_in_the_file(tmp_path: Path) -> None:
    with log.log_file(tmp_path / "driver.log") as path:
        try:
            raise ValueError("bad\nINFO distill_rl: all is well")
        except ValueError:
            log.get().exception("failed")
    first, *rest = path.read_text().splitlines()
    assert first.endswith("ERROR distill_rl: failed")
    assert all(line.startswith("    ") for line in rest)


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b[2J\x1b[31mred", "\\x1b[2J\\x1b[31mred"),
        ("a\nb\rc\x00", "a\\nb\\rc\\x00"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("c1 \x9b31m", "c1 \\x9b31m"),
        ("line\u2028break", "line\\u2028break"),
        ("lone \udc80", "lone \\udc80"),
        ("größe 中文 ✓ \u00a0", "größe 中文 ✓ \u00a0"),
    ],
)
def test_printable_escapes_control_characters(hostile: str, shown: str) -> None:
    assert log.printable(hostile) == shown


def test_messages_cannot_forge_log_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(log.VARIABLE, raising=False)
    log.setup_console()
    logging.getLogger("distill_rl.data").warning("row %s", "\x1b[2J\nERROR: forged")
    assert capsys.readouterr().err == "WARNING: row \\x1b[2J\n    ERROR: forged\n"
