"""Spoiled files that are made from a corpus: packing plans, documents of padded rows, spools."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from maxtext_olmo.corpus.storage import spool as spool_lib
from maxtext_olmo.corpus.storage import spool_file
from tests.hostile import cases
from tests.hostile import damage
from tests.hostile import fixture

Spoil = Callable[[pathlib.Path], None]

_PLAN, _DOCUMENTS = "index.json.packed-*", "index.json.documents.eos"
_SPOOL_BYTES = 1 << 20
_RANGES, _RANGE_BYTES = 40, 100


def all_cases() -> Iterator[cases.Case]:
  """Yields the cases of this module."""
  built = {"missing": "a file that is not there is built"}
  built |= dict.fromkeys(("loop", "dangling"), "a link that leads nowhere is replaced")
  for kind, base, file, names in (
      ("plans", fixture.PACKED, _PLAN, damage.DAMAGES),
      ("sidecars/padded", fixture.PADDED, _DOCUMENTS, damage.SHORT_LIST),
  ):
    attempt = functools.partial(_read_rows, base=base, file=file)
    yield from damage.file_cases(kind, attempt, built, names)
    cut = functools.partial(_cut_in_mid_run, base=base, file=file)
    yield cases.Case(f"{kind}/cut-in-mid-run", cut, "it may be in memory already")
  copies = {"*": "a spool has only copies: what is not whole is requested again"}
  for name, file, names in (
      ("file", "*.spool", damage.DAMAGES),
      ("lock", "lock", damage.IN_PLACE),
      ("directory", "", damage.IN_PLACE),
  ):
    attempt = functools.partial(_use_spool, file=file)
    yield from damage.file_cases(f"spools/{name}", attempt, copies, names)


def _read_rows(folder: pathlib.Path, spoil: Spoil, base: dict[str, Any], file: str) -> None:
  index = fixture.write(folder)
  fixture.read(index, base)
  spoil(next(folder.glob(file)))
  fixture.expect_true(index, base)


def _cut_in_mid_run(folder: pathlib.Path, base: dict[str, Any], file: str) -> None:
  index = fixture.write(folder)
  with fixture.opened(index, base, **fixture.ON_REQUEST) as iterator:
    found = fixture.take_all(iterator, 1)
    fixture.cut_in_place(next(folder.glob(file)))
    found += fixture.take_all(iterator)
  fixture.expect(found, fixture.truth(base))


def _use_spool(folder: pathlib.Path, spoil: Spoil, file: str) -> None:
  """Spoils a spool, reads it, puts everything that is missing, and reads it again."""
  directory = folder / "spool"
  numbers = np.arange(_RANGES)
  digests = np.array([spool_file.file_digest("s3://bucket/part.npy", "version")], np.uint64)
  sizes = np.full(_RANGES, _RANGE_BYTES)
  names = spool_file.make_names(digests, 0 * numbers, numbers * _RANGE_BYTES, sizes)
  places = numbers * _RANGE_BYTES
  data = np.random.Generator(np.random.PCG64(1)).integers(0, 256, places[-1] + 100, np.uint8)

  def read(spool: spool_lib.Spool) -> np.ndarray:
    out = np.zeros_like(data)
    served = spool.read(names, out, places)
    if not np.array_equal(out.reshape(_RANGES, -1)[served], data.reshape(_RANGES, -1)[served]):
      raise cases.WrongDataError("the spool has other bytes than were put")
    return served

  spool = spool_lib.Spool(str(directory), _SPOOL_BYTES)
  spool.put(names, data, places)
  spool.close()
  spoil(next(directory.glob(file)) if file else directory)
  again = spool_lib.Spool(str(directory), _SPOOL_BYTES)
  served = read(again)
  kept = again.put(names[~served], data, places[~served])
  if kept and not read(again)[~served].all():
    raise cases.WrongDataError("ranges that were put are not found")
  again.close()
