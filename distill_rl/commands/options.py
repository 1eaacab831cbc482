"""The options of every command. The name of an option in the parser is that of the parameter it is passed to."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distill_rl import __version__
from distill_rl.config import GPUS_PER_NODE

_EPILOG = """\
a first run, and runs of your own:
  distill-rl quickstart                  make small models and data, distil, evaluate, report
  distill-rl try STUDENT TEACHER TEXT    five minutes of training with your teacher and without it, compared
  distill-rl check -c my.yaml            show what would run, with sizes; changes nothing
  distill-rl inspect -c my.yaml          show rows as they are trained on: which tokens are learnt
  distill-rl train -c my.yaml            train, validate, export
  distill-rl train -c my.yaml --resume   resume after a stop
  distill-rl report runs/my              write the curves to one HTML file
  distill-rl train -c my.yaml --dry-run  write a Slurm batch script, ready to submit

a teacher with another tokenizer:
  distill-rl align --student S --teacher T --data D      show how well the two tokenizers match on your text

settings after the file override it; list entries are numbered:
  distill-rl train -c x.yaml train.steps=100 teachers.0.model=/models/big optimizer.lr=1e-5

exit codes: 0 done, 1 failed, 2 bad input, 85 stopped on SIGTERM, SIGUSR1 or SIGHUP after saving (can be resumed), 130 Ctrl-C
"""


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line, with all commands and their options.

    In its result, `command` is `module.function` in the folder `commands`, or None if no command was given; everything
    else is a keyword of that function, except for `resume`, which `cli` turns into an override.
    """
    about = "Train a smaller causal language model to match a bigger one's token distributions on fixed text."
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="distill-rl", description=about, epilog=_EPILOG, formatter_class=form)
    parser.add_argument("--version", action="version", version=f"distill-rl {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    summary, description = "train a student, validate it, export it", "Train, validate and export a student."
    add = _command(commands, "train", "train.train", summary, description)
    _add_config_and_overrides(add)
    _add_resume(add)
    add("--clean", action="store_true", help="delete the contents of the run directory and start over")
    _add_dry_run(add, " into the run directory")
    array_help = "for --dry-run: one run for each value, or, if given again, for each combination, as an array of jobs"
    add("--array", dest="arrays", action="append", default=[], metavar="KEY=A,B", help=array_help)
    then_help = "for --dry-run: a second script, which evaluates the export when the run is done"
    add("--then", choices=("eval",), help=then_help)

    description = """Print the resolved configuration, the sizes that follow from it (batches, slots, memory, actors)
        and every problem found. Changes nothing."""
    summary = "print the resolved configuration and derived sizes"
    _add_config_and_overrides(_command(commands, "check", "check.check", summary, description))

    description = """Show rows as they will be trained on: every token, which of them are learnt and why the others are
        not, where documents join, the chunks that a teacher with another tokenizer is compared over, and what a chat
        template leaves out. Loads tokenizers only."""
    summary = "show rows as they will be trained on: which tokens are learnt"
    add = _command(commands, "inspect", "inspect.inspect", summary, description)
    _add_config_and_overrides(add)
    add("--rows", type=int, metavar="N", help="the first N rows of the run, packed as in the run; default: 5")
    row_help = "this row of the data on its own, counted from 0; can be given several times"
    add("--row", dest="chosen", type=int, action="append", metavar="I", help=row_help)
    add("--tokens", action="store_true", help="one line per token, with the reason for every token without a label")
    add("--json", dest="as_json", action="store_true", help="one JSON object per row, with everything")

    description = """Predict step time, goodput and memory of every split of a cluster between teacher and student, and
        print the settings of the best. Starts nothing."""
    summary = "which split of a cluster's GPUs suits a configuration"
    add = _command(commands, "plan", "plan.plan", summary, description)
    _add_config_and_overrides(add)
    add("--gpus", type=int, required=True, metavar="N", help="GPUs of the cluster")
    add("--card", choices=("h100", "h200"), default="h100", help="default: %(default)s")
    add("--gpus-per-node", type=int, default=GPUS_PER_NODE, metavar="N", help="default: %(default)s")

    description = """Distil a small student that sorts, train the same student on the same noisy answers without a
        teacher, and compare the two. Takes about two minutes; needs no GPU and no download."""
    summary = "a whole distillation in miniature, in about two minutes"
    add = _command(commands, "quickstart", "demo.quickstart", summary, description)
    add("--cross", action="store_true", help="use a teacher with another tokenizer; runs go to runs/quickstart-cross")
    add("--stored", action="store_true", help="capture the teacher's targets first, and train from them without it")
    real_help = "pretrained models (SmolLM2, fetched once, 89 MiB) and real text; takes some twenty minutes"
    add("--real", action="store_true", help=real_help)
    terms_help = "with --real --cross: you have read and accept the terms of Gemma, the teacher"
    add("--accept-terms", action="store_true", help=terms_help)
    config_help = "default: quickstart.yaml, or with --cross quickstart-cross.yaml, of the package's configs"
    add("-c", "--config", type=Path, metavar="FILE", help=config_help)
    add("--seed", type=int, default=0, metavar="N", help="seed of data, models and data order; default: 0")
    add("--runs", type=Path, default=Path("runs"), metavar="DIR", help="folder of the runs; default: runs")
    material, material_help = Path(".cache/quickstart"), "folder of models and data; default: .cache/quickstart"
    add("--material", type=Path, default=material, metavar="DIR", help=material_help)
    add("--clean", action="store_true", help="delete the runs of an earlier quickstart")
    add("overrides", nargs="*", metavar="key=value", help="settings for both runs, e.g. train.steps=300")

    description = """Try two models on a text, without a configuration: check the pair, choose method and settings,
        train the student with the teacher and for the same time without it, and compare both on text that was held out,
        in bits per byte. Writes the student, a report, the result and the YAML file to go on with into one folder."""
    summary = "is this teacher worth it? a short training with and without it, no YAML"
    add = _command(commands, "try", "demo.trial", summary, description)
    add("student", metavar="STUDENT", help="folder of the model to train, or its name on the hub")
    add("teacher", metavar="TEACHER", help="the same for a larger model, which may have another tokenizer")
    add("text", metavar="TEXT", help="text or chats: a file, a folder or a glob, as data.path accepts them")
    minutes_help = "minutes of each of the two trainings; default: %(default)g"
    add("--minutes", type=float, default=5.0, metavar="M", help=minutes_help)
    add("--steps", type=int, metavar="N", help="steps of each of the two trainings, in place of minutes")
    add("--out", type=Path, metavar="DIR", help="folder for all results; default: runs/try-STUDENT-TEACHER")
    add("--resume", dest="continued", action="store_true", help="go on with a trial that was stopped")
    seed_help = "seed of what is held out and of the order of the text; default: %(default)s"
    add("--seed", type=int, default=0, metavar="N", help=seed_help)
    add("--clean", action="store_true", help="delete an earlier trial in the folder")
    add("overrides", nargs="*", metavar="key=value", help="settings in place of those chosen, e.g. optimizer.lr=1e-4")

    description = """Run the teachers of a configuration over its data and store what they would send to a student, so
        that any number of students can be trained without them (docs/store.md). The same command continues after a
        stop."""
    summary = "store the teachers' targets, for training later"
    add = _command(commands, "capture", "train.capture", summary, description)
    _add_config_and_overrides(add)
    add("--out", required=True, type=Path, metavar="STORE", help="folder of the store; made if it does not exist")
    _add_dry_run(add)

    store = commands.add_parser("store", help="describe, verify, merge and export stores of targets")
    actions = store.add_subparsers(title="actions", metavar="ACTION", required=True)
    description = "Print teacher, contents, size and retained mass."
    add = _command(actions, "info", "store.info", "print what a store holds", description)
    add("store", type=Path, metavar="STORE", help="folder of the store")
    description = "Read all of a store; exits with 2 if it is damaged."
    add = _command(actions, "verify", "store.verify", "compare all checksums", description)
    add("store", type=Path, metavar="STORE", help="folder of the store")
    description = "Copy the targets of several stores of one teacher into one, each piece once."
    add = _command(actions, "merge", "store.merge", "put several stores together", description)
    add("stores", type=Path, nargs="+", metavar="STORE", help="folders of stores")
    add("--out", required=True, type=Path, metavar="STORE", help="folder to copy them to; may be a store")
    description = "Write a store as Parquet files that other tools can read."
    add = _command(actions, "export", "store.export", "write a store as Parquet", description)
    add("store", type=Path, metavar="STORE", help="folder of the store")
    add("--out", required=True, type=Path, metavar="DIR", help="new folder for the files")

    description = """Check a configuration here and run it on an existing Ray cluster, under the name run.name. Folders
        must be on a file system that the cluster shares. See docs/operations.md, Service."""
    submit = _command(commands, "submit", "service.submit", "run a configuration on a Ray cluster", description)
    _add_config_and_overrides(submit)
    _add_resume(submit)
    submit("--follow", action="store_true", help="print the log until the run ends, and exit with its code")
    submit("--python", metavar="FILE", help="interpreter on the cluster; default: the path of this one")

    description = "List the runs that were submitted to a Ray cluster, with state, steps, KD and time."
    status = _command(commands, "status", "service.status", "list the runs on a Ray cluster", description)
    status("name", metavar="NAME", nargs="?", help="one run; default: all")

    description = "Print the output of a submitted run."
    logs = _command(commands, "logs", "service.logs", "print the log of a run on a Ray cluster", description)
    logs("name", metavar="NAME", help="the run")
    logs("--follow", action="store_true", help="until the run ends, and exit with its code")

    description = "Let a submitted run finish its step, save and end, and wait until it has ended."
    stop = _command(commands, "stop", "service.stop", "stop a run on a Ray cluster, after saving", description)
    stop("name", metavar="NAME", help="the run")
    stop("--now", action="store_true", help="end the run immediately, without saving")
    deadline_help = "maximum time to wait; default: %(default)g"
    stop("--deadline", dest="deadline_s", type=float, default=1800.0, metavar="SECONDS", help=deadline_help)
    address_help = "the cluster's dashboard; default: $RAY_API_SERVER_ADDRESS, or http://127.0.0.1:8265"
    for add in (submit, status, logs, stop):
        add("--address", metavar="URL", help=address_help)

    description = "Score model folders on evaluation suites, offline. The same command continues after a stop."
    add = _command(commands, "eval", "evaluate.command", "score models on evaluation suites", description)
    # fmt: off
    add("--model", dest="models", required=True, nargs="+", action="extend", metavar="DIR",
        help="folder of a Hugging Face causal LM, or NAME=DIR; several models are compared")
    add("--suites", required=True, type=_names, metavar="A,B",
        help="suites, or .py files with suites of your own, comma-separated")
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
    add("--tp", "--tensor-parallel", dest="tensor_parallel", type=int, default=1, metavar="N",
        help="GPUs, or processes on CPUs, that each copy of the model is split over; default: %(default)s")
    add("--ray-address", dest="address", metavar="HOST:PORT", help="cluster to join; default: start Ray on this machine")
    add("--deadline", dest="deadline_s", type=float, default=3600.0, metavar="SECONDS",
        help="for loading a model, and for one call of a few batches; default: %(default)g")
    add("--seed", type=int, default=0, metavar="N", help="seed of the items that --limit draws; default: %(default)s")
    add("--strict", action="store_true", help="fail if data differ from the published ones (row counts, contents)")
    add("--clean", action="store_true", help="delete results that are already in --out")
    add("--dry-run", action="store_true", help="only write a Slurm batch script into --out")
    add("--slurm", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help="for --dry-run: settings of the section slurm, such as account=me time=02:00:00")
    # fmt: on

    description = """Print how two tokenizations of a text match, what they have in common, and which loss suits them.
        Only reads the tokenizers. Exits with 2 if a student could learn nothing from such a teacher."""
    summary = "show how well the tokens of two models match on your text"
    add = _command(commands, "align", "align.align", summary, description)
    add("--student", required=True, metavar="DIR", help="folder, or hub name, of a model or tokenizer")
    add("--teacher", required=True, metavar="DIR", help="the same for the teacher")
    data_help = "text or chats, in any form that data.path accepts"
    add("--data", dest="path", required=True, metavar="PATH", help=data_help)
    add("--text-key", metavar="COLUMN", help="column with the text; default: text")
    add("--messages-key", metavar="COLUMN", help="column with the chats; default: messages")
    add("--split", metavar="NAME", help="split to read, for data that have splits; default: train")
    add("--limit", type=int, default=1000, metavar="N", help="at most N rows, evenly spaced; default: %(default)s")
    add("--json", dest="json_file", type=Path, metavar="FILE", help="also write the figures to FILE")
    verify_help = "check alignment and losses on this pair and these rows; exits with 1 if a check fails"
    add("--verify", action="store_true", help=verify_help)

    verify = commands.add_parser("verify", help="measure what quantised weights cost a teacher")
    actions = verify.add_subparsers(title="actions", metavar="ACTION", required=True)
    description = """Load every teacher with teachers[].quantization twice, one after the other, with all of its weights
        and with quantised ones, and compare what they say of a sample of the data: KL per token, agreement, memory,
        speed."""
    summary = "compare a teacher with and without its quantization"
    add = _command(actions, "teacher", "verify.teacher", summary, description)
    _add_config_and_overrides(add)
    add("--rows", type=int, default=64, metavar="N", help="documents of the sample; default: %(default)s")
    full_help = "folder, or hub name, of the original weights; for a teacher with quantization as_stored"
    add("--full", metavar="DIR", help=full_help)
    add("--out", type=Path, metavar="FILE", help="also write the figures to FILE, as JSON")

    description = """Write a checkpoint of a run as a Hugging Face model folder, without Ray, and upload it if asked to.
        Uploading takes the login of the hub's own tools: HF_TOKEN, or `hf auth login`."""
    summary = "write a checkpoint as a Hugging Face model, and publish it"
    add = _command(commands, "export", "export.export", summary, description)
    # fmt: off
    add("run", metavar="RUN", type=Path, help="run directory")
    add("--checkpoint", default="latest", metavar="STEP",
        help="latest (default), best (by checkpoint.best_by), or a step such as 120")
    add("--out", metavar="DIR", type=Path, help="new or empty folder; default: RUN/export, which is replaced")
    add("--dtype", choices=("as_stored", "fp32", "bf16"), default="as_stored",
        help="of the weights; as_stored (default): as in the files of the student that was trained")
    add("--max-file-size", metavar="SIZE", help="largest file of weights, such as 200MB; default: 5GB")
    add("--push", metavar="OWNER/NAME", help="upload to this repository of the Hugging Face hub; created if it does not exist, private")
    add("--public", action="store_true", help="with --push: let everybody read the repository")
    add("--license", dest="licence", metavar="NAME",
        help="for the model card, such as apache-2.0; default: what the student's own card says")
    # fmt: on

    description = """Print state, step, time left and the last fault of a run, then each new line of its log and step,
        until it ends. Reads the run directory only, so it works wherever that can be seen, such as on a cluster's login
        node."""
    add = _command(commands, "follow", "follow.follow", "watch a run by its folder, from any machine", description)
    add("runs", metavar="RUN", nargs="+", type=Path, help="run directory; of several, a line each is printed")
    add("--once", action="store_true", help="print state, step, time left and last fault only")

    description = """Run directories: write RUN/report.html for the first, with curves, timings and evaluation, and draw
        the others over it. Folders of evaluation results: print the scores with 95 % intervals and differences, and
        write them to PATH/comparison.html. The pages work offline."""
    summary = "write one static HTML file about a run, or comparing evaluated models"
    add = _command(commands, "report", "report.report", summary, description)
    paths_help = "run directory, or folder with the results of one or more models"
    add("paths", metavar="PATH", nargs="+", type=Path, help=paths_help)
    add("-o", "--out", metavar="FILE", type=Path, help="the HTML file to write")
    add("--baseline", metavar="NAME", help="model that the others are compared with; default: the first")
    return parser


def _command(commands: Any, name: str, function: str, summary: str, description: str) -> Callable[..., Any]:
    """Adds a command and returns `add_argument` of its parser, which adds its options."""
    parser = commands.add_parser(name, help=summary, description=description)
    parser.set_defaults(command=function)
    return parser.add_argument


def _add_config_and_overrides(add: Callable[..., Any]) -> None:
    """Adds -c/--config (as `path`) and the positional `overrides` to a command, through its `add_argument`."""
    config_help = "YAML file; docs/configuration.md lists every key"
    add("-c", "--config", dest="path", required=True, metavar="FILE", help=config_help)
    add("overrides", nargs="*", metavar="key=value", help="settings that override the file, e.g. train.steps=100")


def _add_dry_run(add: Callable[..., Any], where: str = "") -> None:
    """Adds --dry-run and --gpus-per-node to a command, through its `add_argument`."""
    dry_run_help = f"only write the resolved configuration and a Slurm batch script{where}"
    add("--dry-run", action="store_true", help=dry_run_help)
    gpus_help = f"for --dry-run: GPUs of a node; 0: none; default: slurm.gpus_per_node, or {GPUS_PER_NODE}"
    add("--gpus-per-node", type=int, metavar="N", help=gpus_help)


def _add_resume(add: Callable[..., Any]) -> None:
    """Adds --resume to a command, through its `add_argument`: None without the flag, `latest` for the bare flag."""
    resume_help = """resume from the newest checkpoint (latest, the default), from the newest if there is one (auto), or
        from a step folder"""
    add("--resume", nargs="?", const="latest", metavar="WHAT", help=resume_help)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


class _ListSuites(argparse.Action):
    """Prints the built-in suites and ends the process with 0."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> None:
        from distill_rl.evals.suites.registry import SUITES

        width = max(map(len, SUITES))
        for name, suite in SUITES.items():
            print(f"{name:<{width}}  {suite.title}")
        parser.exit()
