"""The command line. Heavy imports come after parsing, so that --help answers at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill_rl import __version__
from distill_rl.errors import ConfigError, DistillError

_EPILOG = """\
a first run (bash launch/quickstart.sh makes its models and data, and does all of this):
  distill-rl check -c configs/quickstart.yaml            what would run, with sizes; changes nothing
  distill-rl train -c configs/quickstart.yaml            train, validate, export
  distill-rl train -c configs/quickstart.yaml --resume   go on after a stop
  distill-rl report runs/quickstart                      curves as one HTML file

a teacher with another tokenizer (bash launch/quickstart.sh --cross):
  distill-rl align --student S --teacher T --data D      how well the two match on your text

any setting can be given after the file, with list indices:
  distill-rl train -c x.yaml train.steps=100 teachers.0.model=/models/big optimizer.lr=1e-5

exit codes: 0 done, 1 failed, 2 bad input, 85 stopped on SIGTERM or SIGUSR1 after saving (resume me), 130 Ctrl-C
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; errors of ours become lines on stderr, never a traceback."""
    parser = _parser()
    options = _parse(parser, arguments)
    if options.command is None:
        parser.print_help()
        return 2
    try:
        return options.command(options)
    except DistillError as error:
        return _complain(error)
    except KeyboardInterrupt:
        from distill_rl.signals import EXIT_INTERRUPTED

        print("distill-rl: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Like `parse_args`, but settings may also stand after flags: `train -c x.yaml a=1 --clean b=2`."""
    options, extra = parser.parse_known_args(arguments)
    settings = [text for text in extra if "=" in text and not text.startswith("-")]
    unknown = [text for text in extra if text not in settings or "overrides" not in options]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if settings:
        options.overrides += settings
    return options


def _complain(error: DistillError) -> int:
    from distill_rl.observe.log import printable

    for problem in error.problems:
        print(f"distill-rl: error: {printable(problem)}", file=sys.stderr)
    return error.exit_code


def _train(options: argparse.Namespace) -> int:
    from distill_rl.commands.train import train

    overrides = list(options.overrides)
    if options.resume is not None:
        if options.clean:
            raise ConfigError(
                "--resume and --clean", "exclude each other", remedy="--resume goes on, --clean starts over"
            )
        if (
            "=" in options.resume and not Path(options.resume).exists()
        ):  # `--resume train.steps=9`: a setting, not a step folder
            overrides.append(options.resume)
            options.resume = "latest"
        overrides.append(f"checkpoint.resume={options.resume}")
    return train(options.config, overrides, clean=options.clean)


def _check(options: argparse.Namespace) -> int:
    from distill_rl.commands.check import check

    return check(options.config, options.overrides)


def _eval(options: argparse.Namespace) -> int:
    from distill_rl.commands.evaluate import evaluate

    return evaluate(options.model, options.suites.split(","), data=options.data, out=options.out, limit=options.limit)


def _export(options: argparse.Namespace) -> int:
    from distill_rl.commands.export import export

    return export(options.run, checkpoint=options.checkpoint, out=options.out)


def _align(options: argparse.Namespace) -> int:
    from distill_rl.commands.align import align

    given = {"text_key": options.text_key, "messages_key": options.messages_key, "split": options.split}
    columns = {key: value for key, value in given.items() if value is not None}
    return align(
        options.student,
        options.teacher,
        options.data,
        columns,
        limit=options.limit,
        json_file=options.json,
        verify=options.verify,
    )


def _report(options: argparse.Namespace) -> int:
    from distill_rl.commands.report import report

    return report(options.run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distill-rl",
        description="Train a smaller causal language model to match a bigger one's token distributions on fixed text.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"distill-rl {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    train = commands.add_parser(
        "train", help="train a student, validate it, export it", description="Train, validate and export a student."
    )
    _add_config(train)
    train.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="WHAT",
        help="go on from the newest checkpoint (latest, the default), from it if there is one (auto), or from a step folder",
    )
    train.add_argument("--clean", action="store_true", help="delete what the run directory holds and start over")
    train.set_defaults(command=_train)

    check = commands.add_parser(
        "check",
        help="print the resolved configuration and derived sizes",
        description="Print the resolved configuration, what follows from it (batches, slots, memory, actors), and every problem found. Changes nothing.",
    )
    _add_config(check)
    check.set_defaults(command=_check)

    _add_other_commands(commands)
    return parser


def _add_other_commands(commands: Any) -> None:
    evaluation = commands.add_parser(
        "eval",
        help="score a model on evaluation suites",
        description="Score a model folder on evaluation suites, offline.",
    )
    evaluation.add_argument("--model", required=True, metavar="DIR", help="folder of a Hugging Face causal LM")
    evaluation.add_argument("--suites", required=True, metavar="A,B", help="suites, separated by commas (exact_match)")
    evaluation.add_argument("--data", required=True, metavar="PATH", help="file or folder of the suites' data")
    evaluation.add_argument("--out", metavar="DIR", help="where results and items go; default: printed only")
    evaluation.add_argument("--limit", type=int, metavar="N", help="only the first N items")
    evaluation.set_defaults(command=_eval)

    _add_align(commands)

    export = commands.add_parser(
        "export",
        help="write a checkpoint as a Hugging Face model",
        description="Write a checkpoint of a run as a Hugging Face model folder. Needs no Ray.",
    )
    export.add_argument("run", metavar="RUN", type=Path, help="run directory")
    export.add_argument(
        "--checkpoint", default="latest", metavar="STEP", help="latest (default), or a step such as 120"
    )
    export.add_argument("--out", metavar="DIR", type=Path, help="default: RUN/export")
    export.set_defaults(command=_export)

    report = commands.add_parser(
        "report",
        help="write one static HTML file with a run's curves",
        description="Write RUN/report.html: curves, timings, evaluation. Opens offline.",
    )
    report.add_argument("run", metavar="RUN", type=Path, help="run directory")
    report.set_defaults(command=_report)


def _add_align(commands: Any) -> None:
    align = commands.add_parser(
        "align",
        help="how well the tokens of two models match on your text",
        description="Print how two tokenizations of a text match, what they have in common, and which loss suits them. "
        "Reads the tokenizers alone. Exits with 2 where nothing could be learnt across them.",
    )
    align.add_argument("--student", required=True, metavar="DIR", help="folder, or hub name, of a model or tokenizer")
    align.add_argument("--teacher", required=True, metavar="DIR", help="the same of the other side")
    align.add_argument("--data", required=True, metavar="PATH", help="text or chats, in any form that data.path takes")
    align.add_argument("--text-key", metavar="COLUMN", help="column of the text; text")
    align.add_argument("--messages-key", metavar="COLUMN", help="column of the chats; messages")
    align.add_argument("--split", metavar="NAME", help="split to read where the data has splits; train")
    align.add_argument(
        "--limit", type=int, default=1000, metavar="N", help="at most N rows, evenly spaced; %(default)s"
    )
    align.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    align.add_argument(
        "--verify", action="store_true", help="check alignment and losses on this pair and these rows; 1 if one fails"
    )
    align.set_defaults(command=_align)


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-c", "--config", required=True, metavar="FILE", help="YAML file; see docs/configuration.md for every key"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that override the file, e.g. train.steps=100"
    )


if __name__ == "__main__":
    sys.exit(main())
