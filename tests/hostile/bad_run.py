"""Spoiled files of a run: order files, bitmaps, tokenizers, and caches of evaluation requests."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable, Iterator

import numpy as np
import tokenizers

import maxtext_olmo
from maxtext_olmo.evaluation import cache as cache_lib
from maxtext_olmo.evaluation import tokenizer as tokenizer_lib
from maxtext_olmo.order import consumed
from tests.hostile import cases
from tests.hostile import damage
from tests.hostile import fixture

Spoil = Callable[[pathlib.Path], object]


def all_cases() -> Iterator[cases.Case]:
  """Yields the cases of this module."""
  yield from _order_cases()
  yield from _bitmap_cases()
  yield from _tokenizer_cases()
  yield from _cache_cases()


# Order files.


def _read_order(folder: pathlib.Path, spoil: Spoil, pattern: str) -> None:
  index, orders = fixture.write(folder), folder / "orders"
  options = fixture.with_order_cache(folder, fixture.STORED)
  fixture.read(index, options)
  if pattern == "*.lock":  # It is taken to build a file.
    next(orders.glob("*.order")).unlink()
  paths = list(orders.glob(pattern)) if pattern else [orders]
  if not paths:
    raise AssertionError(f"There is no {pattern}.")
  for path in paths:
    spoil(path)
  fixture.expect(fixture.read(index, options), fixture.truth(fixture.STORED))


def _order_cases() -> Iterator[cases.Case]:
  def cut_in_mid_run(folder: pathlib.Path) -> None:
    index, orders = fixture.write(folder), folder / "orders"
    options = fixture.with_order_cache(folder, fixture.STORED)
    with fixture.opened(index, options, **fixture.ON_REQUEST) as iterator:
      found = fixture.take_all(iterator, 2)
      fixture.cut_in_place(next(orders.glob("*.order")))
      found += fixture.take_all(iterator)
    fixture.expect(found, fixture.truth(fixture.STORED))

  rebuilt = {"*": "an order file is a cache: one that is not whole is built again"}
  file = functools.partial(_read_order, pattern="*.order")
  yield from damage.file_cases("orders/file", file, rebuilt)
  lock = functools.partial(_read_order, pattern="*.lock")
  locked = {"*": "nothing is read from a lock file"}
  names = ("empty", "noise", "missing", "directory", "fifo", "loop", "socket", "device-full")
  yield from damage.file_cases("orders/lock", lock, locked, names)
  mark = functools.partial(_read_order, pattern="*.verified")
  marked = {"*": "without a mark, the checksum is computed again"}
  yield from damage.file_cases("orders/mark", mark, marked, damage.SHORT_LIST)
  made = {"missing": "the directory is made", "directory": "the directory is filled again"}
  names = ("missing", "directory", "fifo", "loop", "dangling", "socket", "sparse", "device-full")
  directory = functools.partial(_read_order, pattern="")
  yield from damage.file_cases("orders/directory", directory, made, names)
  yield cases.Case("orders/cut-in-mid-run", cut_in_mid_run, "it may be in memory already")


# Bitmaps of consumed instances.


def _read_bitmap(folder: pathlib.Path, spoil: Spoil, mid_run: bool) -> None:
  index = maxtext_olmo.load_index(path := fixture.write(folder))
  seen = np.arange(index.total_instances) % 3 == 0
  consumed.write_consumed(bitmap := folder / "bitmap", seen, index.fingerprint)
  options = {**fixture.WINDOWS, **fixture.ON_REQUEST, "olmo_consumed_path": str(bitmap)}
  expected = fixture.read(path, options)
  if not mid_run:
    spoil(bitmap)
  with fixture.opened(path, options) as iterator:
    found = fixture.take_all(iterator, 2)
    if mid_run:
      spoil(bitmap)
    found += fixture.take_all(iterator)
  fixture.expect(found, expected)


def _bitmap_cases() -> Iterator[cases.Case]:
  read = functools.partial(_read_bitmap, mid_run=False)
  unused = {"flip-*": "the unused bytes of the header say nothing"}
  yield from damage.file_cases("bitmaps", read, unused)
  for place in range(0, 128, 3):

    def flip(path: pathlib.Path, place: int = place) -> None:
      path.write_bytes(damage.flip(path.read_bytes(), place))

    attempt = functools.partial(read, spoil=flip)
    yield damage.make_case("bitmaps", f"flip-byte-{place}", attempt, unused)
  cut = functools.partial(_read_bitmap, spoil=fixture.cut_in_place, mid_run=True)
  yield cases.Case("bitmaps/cut-in-mid-run", cut, "the bits may be in memory already")


# Tokenizers.

_WORDS = {"the": 0, "cat": 1, "sat": 2, "<unk>": 3, "</s>": 4}
_FILES = {"json": "tokenizer.json", "config": "tokenizer_config.json"}
_TOKENIZER_FIELDS = {
    "json": "version model added_tokens pre_tokenizer truncation model.vocab model.vocab.cat"
    " model.unk_token",
    "config": "eos_token bos_token",
}
_SAID = "a tokenizer has no checksum: what its file says is what it does"


def _load_tokenizer(folder: pathlib.Path, spoil: Spoil, file: str) -> None:
  made = tokenizers.Tokenizer(tokenizers.models.WordLevel(_WORDS, unk_token="<unk>"))
  made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  made.save(str(path := folder / _FILES["json"]))
  (folder / _FILES["config"]).write_text(json.dumps({"eos_token": "</s>", "bos_token": None}))
  spoil(folder / _FILES[file])
  loaded = tokenizer_lib.load_eval_tokenizer(str(folder))
  expected = tokenizers.Tokenizer.from_file(str(path))
  text = "the cat sat"
  if loaded.encode([text])[0].tolist() != expected.encode(text).ids:
    raise cases.WrongDataError("a text has other ids than the file says")
  if loaded.eos_id != expected.token_to_id("</s>"):
    raise cases.WrongDataError(f"the EOS is {loaded.eos_id}")


def _tokenizer_cases() -> Iterator[cases.Case]:
  for file, fields in _TOKENIZER_FIELDS.items():
    attempt = functools.partial(_load_tokenizer, file=file)
    accepts = {"flip-*": _SAID}
    if file == "config":
      special = ("missing", "dangling", "loop", "directory", "fifo", "socket", "device-*")
      accepts |= dict.fromkeys(special, "a config is optional, and a regular file")
    yield from damage.file_cases(f"tokenizers/{file}", attempt, accepts)

    def edit(folder: pathlib.Path, spoil: Callable, file: str = file) -> None:
      _load_tokenizer(folder, functools.partial(damage.edit_json, spoil=spoil), file)

    accepts = {"*=*": _SAID}
    yield from damage.field_cases(f"tokenizers/{file}", edit, fields.split(), accepts)
  for spec in ("", "nowhere.json", "./nowhere", "/nowhere/at/all", "a/b/c", "bytes ", "\0", "..",
               "org\\name", "http://localhost:1/x"):  # fmt: skip
    yield cases.Case(
        f"tokenizers/spec-{spec!r}",
        lambda folder, spec=spec: tokenizer_lib.load_eval_tokenizer(spec),
    )


# The cache of evaluation requests.

_RESULTS = {cache_lib.make_key(i): [-1.5 * i, i % 2 == 0] for i in range(20)}
_BAD_LINES = ("[]\n", "7\n", "null\n", "{}\n", '{"key": 1}\n', '{"key": [], "result": 1}\n',
              '{"key": {}, "result": 1}\n', damage.DEEP + "\n", '{"key": "x"', "\0\n",
              '{"key": NaN, "result": NaN}\n', "\ud800\n")  # fmt: skip


def _use_cache(folder: pathlib.Path, spoil: Spoil) -> None:
  path = folder / "cache.jsonl"
  kept = cache_lib.RequestCache(path)
  for key, result in _RESULTS.items():
    kept.add(key, result)
  kept.close()
  spoil(path)
  again = cache_lib.RequestCache(path)
  found = again.lookup(list(_RESULTS))
  again.add("new", [0.0, True])
  again.close()
  wrong = [key for key, result in found.items() if result != _RESULTS[key]]
  if wrong:
    raise cases.WrongDataError(f"{len(wrong)} requests have results that were never computed")
  last = cache_lib.RequestCache(path)
  added = last.lookup(["new"])
  last.close()
  if added != {"new": [0.0, True]}:
    raise cases.WrongDataError("a result that was added is lost")


def _cache_cases() -> Iterator[cases.Case]:
  again = {"*": "what cannot be read of a cache is computed again"}
  yield from damage.file_cases("caches", _use_cache, again)
  for number, line in enumerate(_BAD_LINES):

    def append(path: pathlib.Path, line: str = line) -> None:
      path.write_bytes(path.read_bytes() + line.encode("utf-8", "surrogatepass"))

    attempt = functools.partial(_use_cache, spoil=append)
    yield damage.make_case("caches", f"line-{number}", attempt, again)
