"""All errors that this package raises on purpose.

    DistillError                 exit code 1
    ├── ConfigError              exit code 2   a setting, or settings that do not fit together
    ├── DataError                exit code 2   rows, columns, files
    │   └── UnreadableFile       exit code 2   a data file that is damaged as a whole, or has changed
    ├── AlignmentError           exit code 1   two tokenizations that cannot be matched
    ├── TransportError           exit code 1   a slot, a handle, a generation
    ├── WorkerError              exit code 1   an actor raised, died or overran its deadline
    ├── CheckpointError          exit code 2   foreign, newer, damaged or missing checkpoint
    ├── StoreError               exit code 2   a store of targets that is foreign, damaged, or lacks what is needed
    ├── NumericsError            exit code 1   NaN or Inf where none may be
    └── GpuMemoryError           exit code 1   a GPU has too little memory left

A message is one line: what, the rule, the value received, the remedy. Every error survives pickling, because most
errors are raised in another process: a class takes the four arguments of `DistillError`, and others have defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class DistillError(Exception):
    """Root of the tree.

    Args:
        what: what is wrong, by the name that the user knows (`data.path`, `student rank 3`).
        rule: the condition that must hold.
        value: the value received instead; shown with `repr` unless it is a string.
        remedy: what the user can do about it.
    """

    exit_code = 1

    def __init__(self, what: str, rule: str = "", value: object = None, remedy: str = ""):
        super().__init__(what, rule, value, remedy)
        self._problems: tuple[str, ...] = ()
        self.what, self.rule, self.value, self.remedy = what, rule, value, remedy

    def __str__(self) -> str:
        """What, the rule, the value, the remedy, as one line without empty parts; of several problems, a line each."""
        if len(self._problems) > 1:
            return "\n".join(self._problems)
        text = self.what
        if self.rule:
            text += f": {self.rule}"
        if self.value is not None:
            text += f"; got {self.value if isinstance(self.value, str) else repr(self.value)}"
        if self.remedy:
            text += f"; {self.remedy}"
        return " ".join(text.split())

    @property
    def problems(self) -> tuple[str, ...]:
        """One line per problem; more than one for an error made by `many`."""
        return self._problems or (str(self),)

    @classmethod
    def many(cls, problems: Iterable[str]) -> DistillError:
        """One error of this class that carries several problems.

        Args:
            problems: each already one line, usually the text of another error.
        """
        lines = tuple(problems)
        error = cls("\n".join(lines))
        error._problems = lines
        return error

    @classmethod
    def raise_all(cls, problems: Iterable[str]) -> None:
        """Raises one error of this class that carries all problems; does nothing if there are none."""
        if lines := tuple(problems):
            raise cls.many(lines)


class ConfigError(DistillError):
    exit_code = 2


def problem(key: str, rule: str, value: object = None, remedy: str = "") -> str:
    """The line of a problem with a setting; the arguments are those of `DistillError`."""
    return str(ConfigError(key, rule, value, remedy))


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def problems_of(*checks: Callable[[], object]) -> list[str]:
    """Runs every check, in order, and returns the lines of all ConfigErrors; empty if none is raised.

    Any other exception passes through, and the results of the checks are dropped.
    """
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems += error.problems
    return problems


class DataError(DistillError):
    exit_code = 2


class UnreadableFile(DataError):
    """A data file that can no longer be read, or has changed since it was opened; not the fault of one row."""


class AlignmentError(DistillError):
    pass


class TransportError(DistillError):
    pass


class WorkerError(DistillError):
    pass


class CheckpointError(DistillError):
    exit_code = 2


class NumericsError(DistillError):
    pass


class GpuMemoryError(DistillError):
    pass


class StoreError(DistillError):
    exit_code = 2
