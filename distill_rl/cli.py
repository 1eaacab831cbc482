"""The command line. Heavy modules are imported after parsing, so that --help answers at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill_rl import __version__
from distill_rl.commands import service_options
from distill_rl.commands.config_options import add_config, add_resume, with_resume
from distill_rl.errors import ConfigError, DistillError

_EPILOG = """\
a first run (bash launch/quickstart.sh makes its models and data, then does all of this):
  distill-rl check -c configs/quickstart.yaml            show what would run, with sizes; changes nothing
  distill-rl train -c configs/quickstart.yaml            train, validate, export
  distill-rl train -c configs/quickstart.yaml --resume   resume after a stop
  distill-rl report runs/quickstart                      write the curves to one HTML file
  distill-rl train -c my.yaml --dry-run                  write a Slurm batch script, ready to submit

a teacher with another tokenizer (bash launch/quickstart.sh --cross):
  distill-rl align --student S --teacher T --data D      show how well the two tokenizers match on your text

settings after the file override it; list entries are numbered:
  distill-rl train -c x.yaml train.steps=100 teachers.0.model=/models/big optimizer.lr=1e-5

exit codes: 0 done, 1 failed, 2 bad input, 85 stopped on SIGTERM or SIGUSR1 after saving (can be resumed), 130 Ctrl-C
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. A DistillError is printed as lines on stderr, without a traceback."""
    parser = _parser()
    options = _parse(parser, arguments)
    if options.command is None:
        parser.print_help()
        return 2
    try:
        return options.command(options)
    except DistillError as error:
        return _print_problems(error)
    except KeyboardInterrupt:
        from distill_rl.system.signals import EXIT_INTERRUPTED

        print("distill-rl: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Like `parse_args`, but settings may also follow flags: `train -c x.yaml a=1 --clean b=2`."""
    options, extra = parser.parse_known_args(arguments)
    settings = [text for text in extra if "=" in text and not text.startswith("-")]
    unknown = [text for text in extra if text not in settings or "overrides" not in options]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if settings:
        options.overrides += settings
    return options


def _print_problems(error: DistillError) -> int:
    from distill_rl.observe.log import printable

    for problem in error.problems:
        print(f"distill-rl: error: {printable(problem)}", file=sys.stderr)
    return error.exit_code


def _train(options: argparse.Namespace) -> int:
    from distill_rl.commands.train import train

    if options.resume is not None and options.clean:
        raise ConfigError(
            "--resume and --clean", "exclude each other", remedy="--resume continues the run, --clean starts over"
        )
    overrides = with_resume(options)
    if options.dry_run:
        from distill_rl.commands.dry_run import dry_run

        if options.clean:
            raise ConfigError("--dry-run and --clean", "exclude each other", remedy="a dry run deletes nothing")
        return dry_run(options.config, overrides, gpus_per_node=options.gpus_per_node)
    return train(options.config, overrides, clean=options.clean)


def _check(options: argparse.Namespace) -> int:
    from distill_rl.commands.check import check

    return check(options.config, options.overrides)


def _eval(options: argparse.Namespace) -> int:
    from distill_rl.commands.evaluate import ExecutorOptions, Request, evaluate
    from distill_rl.evals.backends.base import Settings
    from distill_rl.evals.options import Options

    request = Request(
        models=options.model,
        suites=[name.strip() for name in options.suites.split(",") if name.strip()],
        data=options.data,
        out=options.out,
        options=Options(
            num_fewshot=options.num_fewshot,
            max_new_tokens=options.max_new_tokens,
            limit=options.limit,
            seed=options.seed,
            strict=options.strict,
            clean=options.clean,
            backend=options.backend,
            settings=Settings(
                batch_size=options.batch_size,
                dtype=options.dtype,
                tensor_parallel=options.tensor_parallel,
            ),
        ),
        executor=ExecutorOptions(
            shards=options.shards,
            gpus_per_shard=options.gpus_per_shard,
            address=options.ray_address,
            deadline_s=options.deadline,
        ),
    )
    return evaluate(request)


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

    columns = {"text_key": options.text_key, "messages_key": options.messages_key, "split": options.split}
    columns = {key: value for key, value in columns.items() if value is not None}
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
    add_config(train)
    add_resume(train)
    train.add_argument("--clean", action="store_true", help="delete the contents of the run directory and start over")
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="only write the resolved configuration and a Slurm batch script into the run directory",
    )
    train.add_argument(
        "--gpus-per-node",
        type=int,
        default=8,
        metavar="N",
        help="for --dry-run: GPUs of a node; 0: none; default: %(default)s",
    )
    train.set_defaults(command=_train)

    check = commands.add_parser(
        "check",
        help="print the resolved configuration and derived sizes",
        description="Print the resolved configuration, the sizes that follow from it (batches, slots, memory, actors) and every "
        "problem found. Changes nothing.",
    )
    add_config(check)
    check.set_defaults(command=_check)

    _add_other_commands(commands)
    return parser


def _add_other_commands(commands: Any) -> None:
    service_options.add(commands)
    _add_eval(commands)
    _add_align(commands)

    export = commands.add_parser(
        "export",
        help="write a checkpoint as a Hugging Face model",
        description="Write a checkpoint of a run as a Hugging Face model folder, without Ray.",
    )
    export.add_argument("run", metavar="RUN", type=Path, help="run directory")
    export.add_argument(
        "--checkpoint", default="latest", metavar="STEP", help="latest (default), or a step such as 120"
    )
    export.add_argument("--out", metavar="DIR", type=Path, help="default: RUN/export")
    export.set_defaults(command=_export)

    report = commands.add_parser(
        "report",
        help="write one static HTML file about a run, or comparing evaluated models",
        description="Run directories: write RUN/report.html for the first, with curves, timings and evaluation, and compare it "
        "with the others. Folders of evaluation results: print the scores with 95 % intervals and differences, and write "
        "them to PATH/comparison.html. The pages work offline.",
    )
    report.add_argument(
        "paths",
        metavar="PATH",
        nargs="+",
        type=Path,
        help="run directory, or folder with the results of one or more models",
    )
    report.add_argument("--out", metavar="FILE", type=Path, help="the HTML file to write")
    report.add_argument(
        "--baseline", metavar="NAME", help="model that the others are compared with; default: the first"
    )
    report.set_defaults(command=_report)


def _add_eval(commands: Any) -> None:
    evaluation = commands.add_parser(
        "eval",
        help="score models on evaluation suites",
        description="Score model folders on evaluation suites, offline. The same command continues after a stop.",
    )
    add = evaluation.add_argument
    # fmt: off
    add("--model", required=True, nargs="+", action="extend", metavar="DIR",
        help="folder of a Hugging Face causal LM, or NAME=DIR; several models are compared")
    add("--suites", required=True, metavar="A,B", help="suites, or .py files with suites of your own, comma-separated")
    add("--list", action=_ListSuites, nargs=0, help="print the suites and exit")
    add("--data", required=True, type=Path, metavar="PATH", help="file or folder with the suites' data")
    add("--out", type=Path, metavar="DIR", help="folder for results and items; default: only print the scores")
    add("--backend", choices=("hf", "vllm"), default="hf",
        help="Transformers, or vLLM (needs the vllm extra); default: %(default)s")
    add("--limit", type=int, metavar="N", help="at most N items per suite, drawn with --seed")
    add("--num-fewshot", type=int, metavar="N", help="worked examples, for suites that use them; default: the suite's own")
    add("--max-new-tokens", type=int, metavar="N", help="maximum length of a completion; default: the suite's own")
    add("--batch-size", type=int, default=64, metavar="N", help="prompts run together (hf); default: %(default)s")
    add("--dtype", choices=("auto", "fp32", "bf16"), default="auto",
        help="auto: the dtype of the files on GPUs, fp32 on CPUs")
    add("--shards", type=int, default=1, metavar="K",
        help="copies of the model, each in a Ray actor; 0: one copy, without Ray; default: %(default)s")
    add("--gpus-per-shard", type=float, metavar="X", help="default: an equal share of the available GPUs, at most 1")
    add("--tensor-parallel", type=int, default=1, metavar="N",
        help="GPUs that vllm splits each copy of the model over; default: %(default)s")
    add("--ray-address", metavar="HOST:PORT", help="cluster to join; default: start Ray on this machine")
    add("--deadline", type=float, default=3600.0, metavar="SECONDS",
        help="for loading a model, and for one call of a few batches; default: %(default)g")
    add("--seed", type=int, default=0, metavar="N", help="seed of the items that --limit draws; default: %(default)s")
    add("--strict", action="store_true", help="fail if data differ from the published ones (row counts, contents)")
    add("--clean", action="store_true", help="delete results that are already in --out")
    # fmt: on
    evaluation.set_defaults(command=_eval)


def _add_align(commands: Any) -> None:
    align = commands.add_parser(
        "align",
        help="show how well the tokens of two models match on your text",
        description="Print how two tokenizations of a text match, what they have in common, and which loss suits them. "
        "Only reads the tokenizers. Exits with 2 if a student could learn nothing from such a teacher.",
    )
    align.add_argument("--student", required=True, metavar="DIR", help="folder, or hub name, of a model or tokenizer")
    align.add_argument("--teacher", required=True, metavar="DIR", help="the same for the teacher")
    align.add_argument(
        "--data", required=True, metavar="PATH", help="text or chats, in any form that data.path accepts"
    )
    align.add_argument("--text-key", metavar="COLUMN", help="column with the text; default: text")
    align.add_argument("--messages-key", metavar="COLUMN", help="column with the chats; default: messages")
    align.add_argument("--split", metavar="NAME", help="split to read, for data that have splits; default: train")
    align.add_argument(
        "--limit", type=int, default=1000, metavar="N", help="at most N rows, evenly spaced; default: %(default)s"
    )
    align.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    align.add_argument(
        "--verify",
        action="store_true",
        help="check alignment and losses on this pair and these rows; exits with 1 if a check fails",
    )
    align.set_defaults(command=_align)


if __name__ == "__main__":
    sys.exit(main())
