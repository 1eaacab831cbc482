"""The options of submit, status, logs and stop. `service.py`, which runs them, is imported on demand."""

from __future__ import annotations

import argparse
from typing import Any

from distill_rl.commands.config_options import add_config, add_resume, with_resume


def add(commands: Any) -> None:
    """Adds the four commands to the subparsers of the command line."""
    submit = commands.add_parser(
        "submit",
        help="run a configuration on a Ray cluster",
        description="Check a configuration here and run it on an existing Ray cluster, under the name run.name. Folders must be "
        "on a file system that the cluster shares. See docs/operations.md, Service.",
    )
    add_config(submit)
    add_resume(submit)
    submit.add_argument(
        "--follow", action="store_true", help="print the log until the run ends, and exit with its code"
    )
    submit.add_argument("--python", metavar="FILE", help="interpreter on the cluster; default: the path of this one")
    submit.set_defaults(command=_submit)

    status = commands.add_parser(
        "status",
        help="list the runs on a Ray cluster",
        description="List the runs that were submitted to a Ray cluster, with state, steps, KD and time.",
    )
    status.add_argument("name", metavar="NAME", nargs="?", help="one run; default: all")
    status.set_defaults(command=_status)

    logs = commands.add_parser(
        "logs", help="print the log of a run on a Ray cluster", description="Print the output of a submitted run."
    )
    logs.add_argument("name", metavar="NAME", help="the run")
    logs.add_argument("--follow", action="store_true", help="until the run ends, and exit with its code")
    logs.set_defaults(command=_logs)

    stop = commands.add_parser(
        "stop",
        help="stop a run on a Ray cluster, after saving",
        description="Let a submitted run finish its step, save and end, and wait until it has ended.",
    )
    stop.add_argument("name", metavar="NAME", help="the run")
    stop.add_argument("--now", action="store_true", help="end the run immediately, without saving")
    stop.add_argument(
        "--deadline", type=float, default=1800.0, metavar="SECONDS", help="maximum time to wait; default: %(default)g"
    )
    stop.set_defaults(command=_stop)
    for parser in (submit, status, logs, stop):
        parser.add_argument(
            "--address",
            metavar="URL",
            help="the cluster's dashboard; default: $RAY_API_SERVER_ADDRESS, or http://127.0.0.1:8265",
        )


def _submit(options: argparse.Namespace) -> int:
    from distill_rl.commands.service import submit

    overrides = with_resume(options)
    return submit(options.config, overrides, address=options.address, python=options.python, follow=options.follow)


def _status(options: argparse.Namespace) -> int:
    from distill_rl.commands.service import status

    return status(options.name, address=options.address)


def _logs(options: argparse.Namespace) -> int:
    from distill_rl.commands.service import logs

    return logs(options.name, address=options.address, follow=options.follow)


def _stop(options: argparse.Namespace) -> int:
    from distill_rl.commands.service import stop

    return stop(options.name, address=options.address, now=options.now, deadline_s=options.deadline)
