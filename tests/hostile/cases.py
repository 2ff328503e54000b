"""A case: something hostile that is done to the package, and the rule that judges the outcome.

An attempt runs in a folder of its own. It raises `WrongDataError` if it was given other batches
than the true ones. If it ends without an error, what it was given was the truth; that is right
only if the case says why (`accept`), so nothing is accepted by default.
"""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import shutil
import traceback
from collections.abc import Callable

from maxtext_olmo import errors

Attempt = Callable[[pathlib.Path], object]


class WrongDataError(Exception):
  """Bad data was accepted, and the batches are not the true ones."""


class SkippedError(Exception):
  """The case cannot be tried here; the message says why."""


class RefusedError(errors.MaxtextOlmoError):
  """The command line refused, with a message and an exit code of its own."""


class Verdict(enum.StrEnum):
  """The columns of the table; the last three must stay empty."""

  TYPED = "typed"
  ACCEPTED = "accepted on purpose"
  SKIPPED = "skipped"
  FOREIGN = "FOREIGN"
  HANGS = "HANGS"
  SILENT = "SILENT"


OFFENCES = (Verdict.FOREIGN, Verdict.HANGS, Verdict.SILENT)


@dataclasses.dataclass(frozen=True)
class Case:
  """One attempt.

  Attributes:
    name: What `--only` selects, as in `index/cut-to-half`; before the slash, its row in the table.
    attempt: Tries it in an empty folder.
    accept: Why it is right that nothing is raised; empty if an error is the only right outcome.
    must_work: Whether an error of this package is wrong too.
    seconds: After this long without an answer, the case hangs.
  """

  name: str
  attempt: Attempt
  accept: str = ""
  must_work: bool = False
  seconds: float = 45.0

  @property
  def kind(self) -> str:
    """The row of the table that counts this case."""
    return self.name.split("/")[0]


def judge(case: Case, folder: pathlib.Path) -> tuple[Verdict, str]:
  """Tries a case; returns the verdict and, for an offence, what happened."""
  folder.mkdir(parents=True)
  try:
    case.attempt(folder)
  except SkippedError as error:
    return Verdict.SKIPPED, str(error)
  except WrongDataError as error:
    return Verdict.SILENT, str(error)
  except errors.MaxtextOlmoError as error:
    verdict = Verdict.FOREIGN if case.must_work else Verdict.TYPED
    return verdict, _describe(error)
  except BaseException as error:
    return Verdict.FOREIGN, _describe(error)
  finally:
    shutil.rmtree(folder, ignore_errors=True)
  if case.accept or case.must_work:
    return Verdict.ACCEPTED, case.accept
  return Verdict.SILENT, "no error, and no rule says that this is right"


def _describe(error: BaseException) -> str:
  """Returns the error, and the line of the package that it came through last."""
  frames = [f for f in traceback.extract_tb(error.__traceback__) if "/maxtext_olmo/" in f.filename]
  where = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
  return f"{type(error).__name__}: {str(error)[:300]}{where}"
