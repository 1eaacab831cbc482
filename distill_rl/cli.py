"""The command line. Heavy imports come after parsing, so that --help answers at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill_rl import __version__
from distill_rl.commands import service_options
from distill_rl.errors import ConfigError, DistillError

_EPILOG = """\
a first run (bash launch/quickstart.sh makes its models and data, and does all of this):
  distill-rl check -c configs/quickstart.yaml            what would run, with sizes; changes nothing
  distill-rl train -c configs/quickstart.yaml            train, validate, export
  distill-rl train -c configs/quickstart.yaml --resume   go on after a stop
  distill-rl report runs/quickstart                      curves as one HTML file
  distill-rl train -c my.yaml --dry-run                  write a batch script for Slurm, ready to submit

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
        from distill_rl.system.signals import EXIT_INTERRUPTED

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

    if options.resume is not None and options.clean:
        raise ConfigError("--resume and --clean", "exclude each other", remedy="--resume goes on, --clean starts over")
    overrides = _with_resume(options)
    if options.dry_run:
        from distill_rl.commands.dry_run import dry_run

        if options.clean:
            raise ConfigError("--dry-run and --clean", "exclude each other", remedy="a dry run deletes nothing")
        return dry_run(options.config, overrides, gpus_per_node=options.gpus_per_node)
    return train(options.config, overrides, clean=options.clean)


def _with_resume(options: argparse.Namespace) -> list[str]:
    """The overrides, with what --resume says."""
    overrides = list(options.overrides)
    if options.resume is None:
        return overrides
    if "=" in options.resume and not Path(options.resume).exists():  # a setting, not a step folder
        overrides.append(options.resume)
        options.resume = "latest"
    return [*overrides, f"checkpoint.resume={options.resume}"]


def _check(options: argparse.Namespace) -> int:
    from distill_rl.commands.check import check

    return check(options.config, options.overrides)


def _eval(options: argparse.Namespace) -> int:
    from distill_rl.commands.evaluate import ExecutorOptions, Request, evaluate
    from distill_rl.evals.backends.base import Settings
    from distill_rl.evals.options import Options

    settings = Settings(options.batch_size, options.dtype, options.tensor_parallel)
    return evaluate(
        Request(
            options.model,
            [name.strip() for name in options.suites.split(",") if name.strip()],
            options.data,
            Options(
                options.num_fewshot,
                options.max_new_tokens,
                options.limit,
                options.seed,
                options.strict,
                options.clean,
                backend=options.backend,
                settings=settings,
            ),
            options.out,
            ExecutorOptions(options.shards, options.gpus_per_shard, options.ray_address, options.deadline),
        )
    )


class _ListSuites(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> None:
        from distill_rl.commands.evaluate import print_suites

        print_suites()
        parser.exit()


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

    return report(*options.paths, out=options.out, baseline=options.baseline)


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
    _add_resume(train)
    train.add_argument("--clean", action="store_true", help="delete what the run directory holds and start over")
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="write the resolved configuration and a Slurm batch script into the run directory, and stop",
    )
    train.add_argument(
        "--gpus-per-node", type=int, default=8, metavar="N", help="of that script's nodes; 0: none; %(default)s"
    )
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


def _add_resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="WHAT",
        help="go on from the newest checkpoint (latest, the default), from it if there is one (auto), or from a step folder",
    )


def _add_other_commands(commands: Any) -> None:
    service_options.add(commands, _add_config, _add_resume, _with_resume)
    _add_eval(commands)
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
        help="write one static HTML file of a run, or of evaluated models side by side",
        description="Of run directories: write RUN/report.html with curves, timings and evaluation (of several, the first "
        "one's, with the others beside). Of folders of evaluation results: print the scores with 95 % intervals and "
        "differences, and write them to PATH/comparison.html. The pages open offline.",
    )
    report.add_argument(
        "paths", metavar="PATH", nargs="+", type=Path, help="run directory, or folder of one or several models' results"
    )
    report.add_argument("--out", metavar="FILE", type=Path, help="the HTML file to write")
    report.add_argument("--baseline", metavar="NAME", help="model that differences are to; default: the first one")
    report.set_defaults(command=_report)


def _add_eval(commands: Any) -> None:
    evaluation = commands.add_parser(
        "eval",
        help="score models on evaluation suites",
        description="Score model folders on evaluation suites, offline. Given again after a stop, it goes on where it stopped.",
    )
    add = evaluation.add_argument
    add("--model", required=True, nargs="+", action="extend", metavar="DIR",
        help="folder of a Hugging Face causal LM; several are compared; NAME=DIR names one")  # fmt: skip
    add(
        "--suites",
        required=True,
        metavar="A,B",
        help="suites, separated by commas, or .py files with suites of your own",
    )
    add("--list", action=_ListSuites, nargs=0, help="print the suites and stop")
    add("--data", required=True, type=Path, metavar="PATH", help="folder of the suites' data, or a file")
    add("--out", type=Path, metavar="DIR", help="where results and items go; default: printed only")
    add(
        "--backend",
        choices=("hf", "vllm"),
        default="hf",
        help="Transformers, or vLLM (needs the vllm extra); %(default)s",
    )
    add("--limit", type=int, metavar="N", help="at most N items per suite, drawn by --seed")
    add(
        "--num-fewshot",
        type=int,
        metavar="N",
        help="worked examples, for suites that take any; default: the suite's own",
    )
    add("--max-new-tokens", type=int, metavar="N", help="limit of a completion; default: the suite's own")
    add("--batch-size", type=int, default=64, metavar="N", help="prompts run together (hf); %(default)s")
    add("--dtype", choices=("auto", "fp32", "bf16"), default="auto",
        help="auto: that of the files on GPUs, fp32 on CPUs")  # fmt: skip
    add(
        "--shards",
        type=int,
        default=1,
        metavar="K",
        help="copies of the model, each a Ray actor; 0: no Ray; %(default)s",
    )
    add("--gpus-per-shard", type=float, metavar="X", help="default: the GPUs there are, shared out, at most 1 each")
    add(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="GPUs per shard that vllm splits a model over; %(default)s",
    )
    add("--ray-address", metavar="HOST:PORT", help="cluster to join; default: Ray is started here")
    add("--deadline", type=float, default=3600.0, metavar="SECONDS",
        help="for loading a model, and for one call of a few batches; %(default)g")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="of the items that --limit draws; %(default)s")
    add("--strict", action="store_true", help="data that are not as published (row counts, contents) are an error")
    add("--clean", action="store_true", help="throw away results that are in --out already")
    evaluation.set_defaults(command=_eval)


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
