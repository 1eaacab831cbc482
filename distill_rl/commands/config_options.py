"""The options that name a configuration, shared by train, check and submit."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-c", "--config", required=True, metavar="FILE", help="YAML file; docs/configuration.md lists every key"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that override the file, e.g. train.steps=100"
    )


def add_resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="WHAT",
        help="resume from the newest checkpoint (latest, the default), from the newest if there is one (auto), or from a "
        "step folder",
    )


def with_resume(options: argparse.Namespace) -> list[str]:
    """The overrides, with `checkpoint.resume` set by --resume."""
    overrides = list(options.overrides)
    if options.resume is None:
        return overrides
    # A bare --resume may be followed by a setting, which argparse takes for its value.
    if "=" in options.resume and not Path(options.resume).exists():
        overrides.append(options.resume)
        options.resume = "latest"
    return [*overrides, f"checkpoint.resume={options.resume}"]
