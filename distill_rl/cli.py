"""The command line. Heavy modules are imported after parsing, so that --help answers at once."""

from __future__ import annotations

import argparse
import atexit
import errno
import gc
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

from distill_rl.commands.options import make_parser
from distill_rl.errors import ConfigError, DistillError
from distill_rl.system import output
from distill_rl.system.fork_server import ForkServer
from distill_rl.system.without_torch import gpu_possible, import_transformers_without_torch, remember_families

_TRAINING = {"train.train", "train.capture", "demo.quickstart", "demo.trial"}
"""Commands that go on when nobody can read what they print: what they make is in files."""
_RUNS = {"demo.quickstart"}
"""Commands that run `distill-rl train`, and train models themselves."""
_BROKEN_PIPE = 141
"""The exit code that a shell gives for a program that SIGPIPE ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; 2 after printing the help without a command, 130 after Ctrl-C.

    A DistillError is printed as lines on stderr, without a traceback, and gives its own exit code. Bad options end the
    process with 2.

    Args:
        arguments: the command line without the program's name; None: that of this process, whose stdout and stderr are
            then guarded (`distill_rl.system.output`). If stdout cannot be written, only a command that trains goes on.
    """
    if arguments is not None:
        return _main(arguments)
    try:
        output.guard()
        try:
            code = _main(None)
        except SystemExit as ended:  # of the parser
            code = ended.code if isinstance(ended.code, int) else 1
        sys.stdout.flush()
        return code
    except output.OutputLost as lost:
        if isinstance(lost.cause, BrokenPipeError):
            return _BROKEN_PIPE  # whoever reads has gone, as in `distill-rl store info STORE | head -2`
        return _print_problems(DistillError("stdout", "must take what is printed", lost.cause.strerror))


def _main(arguments: Sequence[str] | None) -> int:
    """Runs one command, as `main` does, with stdout as it is."""
    parser = make_parser()
    options = _parse(parser, arguments)
    if options.command is None:
        parser.print_help()
        return 2
    remember_families()
    if arguments is None and options.command == "check.check":
        gc.set_threshold(500_000)  # nearly all that it allocates are modules, which stay
        atexit.register(gc.freeze)
    try:
        if arguments is None and options.command in _TRAINING:
            output.go_on_without()
        if options.command == "evaluate.command" or options.command in _RUNS:
            os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub's library is imported, by the fork server, too
        with ForkServer() if options.command in _RUNS or _starts_ray(options) else nullcontext():
            # Only in a process of its own: a caller's Transformers must keep its models.
            uses_gpu = options.command != "inspect.inspect" and gpu_possible()
            known = options.command in ("inspect.inspect", "check.check") or _starts_ray(options)
            if arguments is None and known and not uses_gpu:
                import_transformers_without_torch()
            return _run(options)
    except DistillError as error:
        return _print_problems(error)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        rule = "a name in a path may have 255 bytes, and a path 4,096"
        return _print_problems(ConfigError(f"{str(error.filename)[:80]!r}...", rule, remedy="check the path"))
    except KeyboardInterrupt:
        from distill_rl.system.signals import EXIT_INTERRUPTED

        print("distill-rl: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _starts_ray(options: argparse.Namespace) -> bool:
    """Whether a command has its models in Ray's processes, which it starts unless its configuration joins a cluster."""
    if options.command == "evaluate.command":
        return bool(options.shards) and options.address is None and not options.dry_run
    is_run = options.command in ("train.train", "train.capture") and not options.dry_run
    return is_run or options.command == "demo.trial"


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Like `parse_args`, but settings may also follow flags: `train -c x.yaml a=1 --clean b=2`."""
    # Exits with 2 if other arguments are left over, or if the command takes no settings.
    options, extra = parser.parse_known_args(arguments)
    settings = [text for text in extra if "=" in text and not text.startswith("-")]
    unknown = [text for text in extra if text not in settings or "overrides" not in options]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if settings:
        options.overrides += settings
    return options


def _run(options: argparse.Namespace) -> int:
    """Calls the command's function with its options as keywords, and returns its exit code."""
    # `options.command` is `module.function` of the folder `commands`; `options.resume` is passed as an override.
    keywords = vars(options)
    module, function = keywords.pop("command").split(".")
    if "resume" in keywords:
        keywords["overrides"] = _with_resume(**keywords)
        del keywords["resume"]
    return getattr(import_module(f"distill_rl.commands.{module}"), function)(**keywords)


def _with_resume(overrides: Sequence[str], resume: str | None, clean: bool = False, **_: object) -> list[str]:
    """The overrides, with `checkpoint.resume` set by --resume; unchanged if `resume` is None."""
    # A `resume` like `key=value` that is no existing path is a setting after a bare --resume, which means `latest`.
    if resume is None:
        return list(overrides)
    if clean:
        remedy = "--resume continues the run, --clean starts over"
        raise ConfigError("--resume and --clean", "exclude each other", remedy=remedy)
    # A bare --resume may be followed by a setting, which argparse takes for its value.
    if "=" in resume and not Path(resume).exists():
        return [*overrides, resume, "checkpoint.resume=latest"]
    return [*overrides, f"checkpoint.resume={resume}"]


def _print_problems(error: DistillError) -> int:
    """Prints one line per problem on stderr, without secrets and control characters; returns the error's exit code."""
    from distill_rl.observe.log import printable

    for problem in error.problems:
        print(f"distill-rl: error: {printable(problem)}", file=sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
