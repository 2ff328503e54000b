"""Spoiled files of a corpus: index, tokens, headers, masks, boundaries, names, mix, sidecars."""

from __future__ import annotations

import csv
import functools
import gzip
import io
import json
import pathlib
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import maxtext_olmo
from tests import corpora
from tests.hostile import cases
from tests.hostile import damage
from tests.hostile import fixture
from tests.loader import row_sources

Spoil = Callable[[pathlib.Path], None]


def all_cases() -> Iterator[cases.Case]:
  """Yields the cases of this module."""
  yield from damage.file_cases("index", _read_index, _INDEX_ACCEPTS)
  yield from damage.field_cases("index", _read_index_with_field, _INDEX_FIELDS, _INDEX_ACCEPTS)
  raw = dict.fromkeys(damage.SAME_SIZE, "raw tokens carry no checksum; `verify` compares them")
  for number in (0, 3):
    read = functools.partial(_read_tokens, number=number)
    yield from damage.file_cases(f"tokens/part-{number}", read, raw)
  yield from damage.file_cases("tokens/verify", _verify_tokens)
  swaps = ("noise", "zeros", "flip-3", "cut-to-half", "longer-by-a-page")
  kept = {"*": "a file that is kept open stays the file that it was"}
  for most_open, accepts in ((0, kept), (1, {})):
    swap = functools.partial(_swap_tokens, most_open=most_open)
    yield from damage.file_cases(f"tokens/swapped-open-{most_open}", swap, accepts, swaps)
    cut = functools.partial(_swap_tokens, spoil=None, most_open=most_open)
    yield cases.Case(f"tokens/cut-in-mid-run-open-{most_open}", cut)
  yield from _header_cases()
  said = dict.fromkeys(damage.SAME_SIZE, "a mask is what its bytes say")
  for source in ("outside_in", "packed_olmo_core"):
    read = functools.partial(_read_masks, source=source)
    yield from damage.file_cases(f"masks/{source}", read, said, damage.SHORT_LIST)
  yield from _boundary_cases()
  yield from _name_cases()
  yield from _manifest_cases()
  yield from _sidecar_cases()


# The index.

_TOP = (
    "format_version sequence_length dtype tokenizer files total_instances total_tokens fingerprint"
    " base max_target_sequence_length split_key split_windows unknown files.0"
)
_ENTRY = "path label n_tokens n_instances instance_offset size_bytes data_offset checksum"
_INDEX_FIELDS = (*_TOP.split(), *(f"files.1.{name}" for name in _ENTRY.split()))
_LABEL = "a label is any text, and no part of the stream"
_CHECKSUM = "checksums are optional, and only `verify` compares them"
_SAME = "the default, and the value of this index"
_INDEX_ACCEPTS = {
    "bom": "a byte-order mark is skipped",
    "cut-by-1-byte": "only the line break at the end is missing",
    "flip-*": "a flip in a label leaves the stream as it is",
    "files.1.label=text": _LABEL,
    "files.1.label=nul": _LABEL,
    "files.1.checksum=removed": _CHECKSUM,
    "files.1.checksum=null": _CHECKSUM,
    "files.1.checksum=text": _CHECKSUM,
    "files.1.checksum=nul": _CHECKSUM,
    "files.1.data_offset=removed": _SAME,
    "max_target_sequence_length=removed": _SAME,
    "unknown=removed": "nothing is unknown then",
}


def _read_index(folder: pathlib.Path, spoil: Spoil) -> None:
  index = fixture.write(folder)
  spoil(pathlib.Path(index))
  fixture.expect_true(index)


def _read_index_with_field(folder: pathlib.Path, spoil: Callable[[Any], Any]) -> None:
  def change(document: Any) -> Any:
    document["unknown"] = "@"
    document["files"][1]["checksum"] = "sha256:0"
    spoiled = spoil(document)
    return {name: value for name, value in spoiled.items() if value != "@"}

  _read_index(folder, functools.partial(damage.edit_json, spoil=change))


# Token files.


def _read_tokens(folder: pathlib.Path, spoil: Spoil, number: int) -> None:
  index = fixture.write(folder)
  spoil(folder / f"data/part-00{number}.npy")
  found = fixture.read(index)
  fixture.expect_files(found, folder)
  if len(found) != len(fixture.truth()):
    raise cases.WrongDataError(f"{len(found)} batches instead of {len(fixture.truth())}")


def _build(folder: pathlib.Path, **options: Any) -> str:
  files = [(str(path), "x") for path in sorted((folder / "data").glob("*.npy"))]
  index = maxtext_olmo.build_index(files, 8, tokenizer="test", dtype="uint16", **options)
  index.save(path := str(folder / "index.json"))
  return path


def _verify_tokens(folder: pathlib.Path, spoil: Spoil) -> None:
  fixture.write(folder)
  index = _build(folder, checksums="xxh3")
  spoil(folder / "data/part-003.npy")
  fixture.run_cli("verify", index)


def _swap_tokens(folder: pathlib.Path, spoil: Spoil | None, most_open: int) -> None:
  """In mid-run, another file takes the place of one, or the file itself is cut."""
  index, path = fixture.write(folder), folder / "data/part-003.npy"
  with fixture.opened(index, **fixture.ON_REQUEST, olmo_max_open_files=most_open) as iterator:
    found = fixture.take_all(iterator, 4)
    if spoil is None:
      fixture.cut_in_place(path)
    else:
      other = path.with_suffix(".new")
      other.write_bytes(path.read_bytes())
      spoil(other)
      other.rename(path)
    found += fixture.take_all(iterator)
  fixture.expect(found, fixture.truth())


# Headers.

_HEADER = "{'descr': '<u2', 'fortran_order': False, 'shape': (256,), }"
_REPLACED = {  # What stands in the header instead of something.
    "<u2": (">u2", "<f2", "<u4", "|O", "zz", ""),
    "'<u2'": ("7", "[('a', '<u2')]", "None"),
    "False": ("True", "'no'", "None"),
    "(256,)": ("(16, 16)", "()", "(-256,)", "(1e999,)", "(1e999-1e999,)", "(256.0,)", f"({2**70},)",
               f"({2**63 + 256},)", "(True,)", "('256',)", "256", "(255,)", "(257,)",
               "(__import__('os').mkdir('executed'),)"),
    ", 'shape': (256,)": ("", ", 'sha\0pe': (256,)", ", 'shape': (256,), 'x': 1"),
    _HEADER: ("", "[1, 2]", "(" * 5000, "__import__('os').mkdir('executed')",
              _HEADER + " " * 70_000),
}  # fmt: skip
_WHOLE_ROWS = 256 // 8


def _with_header(text: str, version: int = 1, length: int | None = None) -> bytes:
  """Returns a file of 256 tokens after a `.npy` header with some text."""
  width, data = (2 if version == 1 else 4), text.encode("latin1") + b"\n"
  size = min(len(data) if length is None else length, 256**width - 1).to_bytes(width, "little")
  return b"\x93NUMPY" + bytes([version, 0]) + size + data + np.full(256, 7, "<u2").tobytes()


def _header_cases() -> Iterator[cases.Case]:
  whole = _with_header(_HEADER)
  contents = {
      f"{old[:9]}-{number}": _with_header(_HEADER.replace(old, new))
      for old, values in _REPLACED.items()
      for number, new in enumerate(values)
  }
  contents |= {f"version-{v}": _with_header(_HEADER, v) for v in (0, 2, 3, 4, 255)}
  contents |= {f"length-{n}": _with_header(_HEADER, length=n) for n in (0, 1, 30, 600, 65535)}
  contents |= {f"cut-to-{n}": whole[:n] for n in (2, 4, 6, 8, 10, 30, 69, 100)}
  contents |= {f"flip-{n}": damage.flip(whole, n) for n in range(0, 72, 6)}
  accepts = {
      "indexed/version-[23]": "a header of version 2 or 3",
      "indexed/cut-to-[24]": "too short for a header, so raw: less than a row of tokens",
      "later/*": "the index says where tokens begin; of the same size, only they are read",
  }
  for name, content in contents.items():
    for when in ("indexed", "later"):
      attempt = functools.partial(_read_header, content=content, later=when == "later")
      yield damage.make_case("headers", f"{when}/{name}", attempt, accepts)


def _read_header(folder: pathlib.Path, content: bytes, later: bool) -> None:
  fixture.write(folder)
  path = folder / "data/part-001.npy"
  path.write_bytes(_with_header(_HEADER) if later else content)
  index = _build(folder)
  path.write_bytes(content)
  found = fixture.read(index)
  if pathlib.Path("executed").exists():
    pathlib.Path("executed").rmdir()
    raise cases.WrongDataError("the header was executed")
  fixture.expect_files(found, folder)
  rows = sum(int((row == 7).all()) for batch in found for row in batch["inputs"])
  if rows != (_WHOLE_ROWS if len(content) > 16 else 0):
    raise cases.WrongDataError(f"{rows} rows of the file, which has {_WHOLE_ROWS}")


# Loss masks.


def _read_masks(folder: pathlib.Path, spoil: Spoil, source: str) -> None:
  index = row_sources.write_corpus(str(folder))
  options = row_sources.config_values(source, index, str(folder / "orders"))
  mask = pathlib.Path(row_sources.mask_path(str(folder / "data/part-000.npy")))
  size = mask.stat().st_size
  with fixture.opened(index, options) as iterator:
    expected = fixture.take_all(iterator, 8)
  spoil(mask)
  with fixture.opened(index, options) as iterator:
    found = fixture.take_all(iterator, 8)
  if mask.stat().st_size == size:  # The masks are others, the tokens are not.
    expected = [{"inputs": batch["inputs"]} for batch in expected]
  fixture.expect(found, expected)


# Boundary files.

_ROWS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "none": (), "without-the-last": fixture.BOUNDARIES[:-1], "overlap": ((0, 20), (15, 150)),
    "reversed": fixture.BOUNDARIES[::-1], "backwards": ((20, 0), (20, 150)),
    "negative": ((-5, 20), (20, 150)), "beyond-the-end": ((0, 20), (20, 151)),
    "huge": ((0, 20), (20, 2**70)), "fraction": ((0, 20.5), (20.5, 150)), "text": (("a", "b"),),
    "one-column": ((0,), (20,)), "empty-line": ((0, 150), ()), "infinite": ((0, "1e999"),),
    "heading": (("start", "end"), *fixture.BOUNDARIES), "nul": (("0", "20\0"), (20, 150)),
    "quote": (('"0', 20), (20, 150)), "long-line": ((0, "1" * 200_000),),
}  # fmt: skip

_GAPS = {"gap": ((0, 20), (25, 150)), "without-the-first": fixture.BOUNDARIES[1:]}


def _boundary_cases() -> Iterator[cases.Case]:
  def attempt(folder: pathlib.Path, spoil: Spoil) -> None:
    index = fixture.write(folder)
    spoil(folder / fixture.BOUNDARY_FILE)
    fixture.expect_true(index, fixture.DOCUMENTS)

  accepts = {
      "flip-*": "gzip's checksum covers the rows; the rest of its header does not matter",
      "longer-by-a-page": "gzip ignores zeros after its end",
  }
  # Without the file, documents are found by their EOS, which are others in this corpus.
  names = [name for name in damage.DAMAGES if name != "missing"]
  yield from damage.file_cases("boundaries", attempt, accepts, names)
  for name, rows in _ROWS.items():
    write = functools.partial(fixture.write_boundaries, rows=rows)
    yield cases.Case(f"boundaries/rows-{name}", functools.partial(attempt, spoil=write))

  def leave_out(folder: pathlib.Path, rows: tuple[tuple[int, int], ...]) -> None:
    index = fixture.write(folder)
    fixture.write_boundaries(folder / fixture.BOUNDARY_FILE, rows=rows)
    with unittest.TestCase().assertLogs(level="WARNING") as logs:
      fixture.expect_files(fixture.read(index, fixture.DOCUMENTS), folder)
    if "tokens lie between documents and are skipped" not in "".join(logs.output):
      raise cases.WrongDataError("documents are left out, and nothing says so")

  for name, rows in _GAPS.items():
    yield cases.Case(
        f"boundaries/rows-{name}",
        functools.partial(leave_out, rows=rows),
        accept="documents may leave tokens out, and a warning counts them",
    )


# Names of documents.

_NAMES = {  # Of a document, in a boundary file that is CSV in all else.
    "empty": "", "blank": " ", "digits": "7", "comma": "a,b", "quote": 'a"b', "quotes": '"""',
    "newline": "a\nb", "return": "a\rb", "nul": "a\0b", "escape": "\x1b[31m", "long": "x" * 99_000,
    "formula": "=1+1", "separator": "a\u2028b", "right-to-left": "\u202eabc", "script": "<script>",
    "path": "../../etc/passwd", "emoji": "🙂" * 30_000, "surrogate": "\ud800", "huge": "x" * 200_000
}  # fmt: skip


def _name_cases() -> Iterator[cases.Case]:
  def attempt(folder: pathlib.Path, name: str) -> None:
    index = fixture.write(folder)
    text = io.StringIO()
    rows = [(0, 20, name, name, 1), (20, 90, "other"), (90, 150, name)]
    csv.writer(text).writerows(rows)
    data = text.getvalue().encode(errors="surrogatepass")
    (folder / fixture.BOUNDARY_FILE).write_bytes(gzip.compress(data, mtime=0))
    fixture.run_cli("index", "documents", index, "--eos-id", "0", "--hashes")
    loaded = maxtext_olmo.load_index(index)
    documents = maxtext_olmo.load_documents(index + ".documents", loaded)
    first = int(documents.file_offsets[1])
    named = [tuple(one) for one in documents.describe(first + np.arange(3))]
    if named != [(name, name, 1), ("other", "", None), (name, "", None)]:
      raise cases.WrongDataError(f"a document has another name: {named!r:.200}")
    if name and documents.find_names([name])[0].tolist() != [first, first + 2]:
      raise cases.WrongDataError("a name finds other documents")
    fixture.run_cli(
        *("inspect", _config_of(folder, index), "--document", str(first)),
    )

  for name, text in _NAMES.items():
    yield cases.Case(
        f"names/{name}",
        functools.partial(attempt, name=text),
        accept="any UTF-8 text that CSV can hold is a name",
    )


def _config_of(folder: pathlib.Path, index: str) -> pathlib.Path:
  """Writes a config for `inspect`."""
  values = {**fixture.WINDOWS, "olmo_index_path": index}
  (path := folder / "config.json").write_text(json.dumps(values))
  return path


# Manifests.

_LINES = "".join(f"label-{i % 2},part-00{i}.npy\n" for i in range(4))
_ADDED = {  # A line after the good ones.
    "parent": "x,../data/part-000.npy", "outside": "x,../outside.npy", "absolute": "x,/etc/hosts",
    "nul": "x,part-\0.npy", "nul-label": "x\0,part-000.npy", "no-comma": "part-000.npy",
    "two-commas": "x,y,part-000.npy", "no-label": ",part-000.npy", "no-path": "x,",
    "placeholder": "x,{SECRET}/part-000.npy", "separator": "x,part-000.npy\u2028y",
    "missing": "x,nowhere.npy", "directory": "x,.", "fifo": "x,fifo", "device": "x,device-zero",
    "loop": "x,loop", "url": "x,s3://bucket/part-000.npy", "file-url": "x,file:///etc/hostname",
    "home": "x,~/part-000.npy", "long-name": "x," + "y" * 5000, "long-line": "x," + "y/" * 500_000,
    "many": "x,nowhere.npy\n" * 50_000,
}  # fmt: skip
_MANIFESTS = {
    **{f"line-{name}": _LINES + line + "\n" for name, line in _ADDED.items()},
    "line-twice": _LINES + "label-0,part-000.npy\n",
    "windows-lines": _LINES.replace("\n", "\r\n"),
    "only-comments": "# nothing\n\n",
}
_LEGIBLE = "a manifest has no checksum: the index holds exactly the lines that it has"
_MANIFEST_ACCEPTS = {
    **dict.fromkeys(("flip-*", "cut-to-half", "cut-by-1-byte", "twice"), _LEGIBLE),
    "bom": "a byte-order mark is skipped",
    "line-twice": "upsampling repeats lines on purpose",
    "windows-lines": "lines may end as on Windows",
    "line-parent": "it stays within the base",
    "line-nul-label": "a label is any text",
}


def _manifest_cases() -> Iterator[cases.Case]:
  yield from damage.file_cases("manifests", _build_from_manifest, _MANIFEST_ACCEPTS)
  for name, text in _MANIFESTS.items():
    spoil = functools.partial(pathlib.Path.write_text, data=text, encoding="utf-8")
    attempt = functools.partial(_build_from_manifest, spoil=spoil)
    yield damage.make_case("manifests", name, attempt, _MANIFEST_ACCEPTS)


def _build_from_manifest(folder: pathlib.Path, spoil: Spoil) -> None:
  fixture.write(folder)
  data, output = folder / "data", folder / "new.json"
  for name in ("fifo", "device-zero", "loop"):
    damage.put_in_place(data / name, name)
  corpora.write_tokens(folder / "outside.npy", 100, seed=9)
  (mix := data / "mix.txt").write_text(_LINES)
  spoil(mix)
  fixture.run_cli(
      "index", "build", "--mix-file", mix, "--base", data, "--tokenizer", "test", "--dtype",
      "uint16", "--sequence-length", "8", "--output", output,
  )  # fmt: skip
  lines = mix.read_bytes().decode("utf-8-sig").splitlines()
  named = [line.strip().split(",") for line in lines if line.strip() and line[0] != "#"]
  built = json.loads(output.read_text())["files"]
  if [(entry["label"], (data / entry["path"]).resolve()) for entry in built] != [
      (label, (data / path).resolve()) for label, path in named
  ]:
    raise cases.WrongDataError("the index holds other files than the manifest")


# Sidecars.


def _sidecar_cases() -> Iterator[cases.Case]:
  def attempt(folder: pathlib.Path, spoil: Spoil) -> None:
    index = fixture.write(folder)
    fixture.read(index, fixture.DOCUMENTS)
    spoil(folder / "index.json.documents")
    fixture.expect_true(index, fixture.DOCUMENTS)

  def cut_in_mid_run(folder: pathlib.Path) -> None:
    index = fixture.write(folder)
    with fixture.opened(index, fixture.DOCUMENTS, **fixture.ON_REQUEST) as iterator:
      found = fixture.take_all(iterator, 1)
      fixture.cut_in_place(folder / "index.json.documents")
      found += fixture.take_all(iterator)
    fixture.expect(found, fixture.truth(fixture.DOCUMENTS))

  missing = {"missing": "a document index that is not there is built"}
  missing |= dict.fromkeys(("loop", "dangling"), "a link that leads nowhere is replaced")
  yield from damage.file_cases("sidecars", attempt, missing)
  planned = "an epoch that was planned needs the document index no more"
  yield cases.Case("sidecars/cut-in-mid-run", cut_in_mid_run, planned)
