"""Compares two indexes of a corpus, and keeps the held-out split when a corpus is extended."""

import collections
import dataclasses

from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.errors import CorpusError

_SHOWN = 10


def keep_split(
    index: index_lib.OlmoNpyIndex, older: index_lib.OlmoNpyIndex
) -> index_lib.OlmoNpyIndex:
  """Returns `index` with the held-out split of `older`; raises if `index` does not extend it."""
  if index_lib.find_prefix(index, older.fingerprint) != len(older.files):
    changes = "\n".join(f"  {line}" for line in describe_changes(older, index))
    raise CorpusError(
        f"The corpus does not extend the older index:\n{changes}\nKeep the old files unchanged and"
        " in order, and add new files after them."
    )
  return dataclasses.replace(index, split_key=older.split_key, split_windows=older.split_windows)


def describe_changes(old: index_lib.OlmoNpyIndex, new: index_lib.OlmoNpyIndex) -> list[str]:
  """Returns one line per difference; no lines if the fingerprints are equal."""
  lines = []
  for name in ("dtype", "tokenizer"):
    if getattr(old, name) != getattr(new, name):
      lines.append(f"{name}: was {getattr(old, name)!r}, is {getattr(new, name)!r}")
  if old.window != new.window:
    lines.append(
        f"windows: files were cut into windows of {old.window} tokens, and are now cut into windows"
        f" of {new.window}, which changes the instances; if the sequence length will change, build"
        " the index with --max-target-sequence-length"
    )
  before, after = _by_name(old), _by_name(new)
  kinds: dict[str, list[str]] = {
      kind: [] for kind in ("removed", "grown", "shrunk", "replaced", "changed head", "added")
  }
  for path, entry in before.items():
    if path not in after:
      kinds["removed"].append(f"{path} ({entry.size_bytes:,} bytes)")
      continue
    found = after[path]
    sizes = f"{path} ({entry.size_bytes:,} to {found.size_bytes:,} bytes)"
    if found.size_bytes > entry.size_bytes:
      kinds["grown"].append(sizes)
    elif found.size_bytes < entry.size_bytes:
      kinds["shrunk"].append(sizes)
    elif found.data_offset != entry.data_offset or _checksums_differ(found, entry):
      kinds["replaced"].append(f"{path} (same size, different content)")
    if found.head_tokens != entry.head_tokens:
      kinds["changed head"].append(f"{path} ({_head(entry)} to {_head(found)} tokens)")
  last_kept = max((place for place, path in enumerate(after) if path in before), default=-1)
  for place, (path, entry) in enumerate(after.items()):
    if path not in before:
      where = "at the end" if place > last_kept else f"at place {place}"
      kinds["added"].append(f"{path} ({entry.size_bytes:,} bytes, {where})")
  for kind, files in kinds.items():
    lines += [f"{kind}: {file}" for file in files[:_SHOWN]]
    if len(files) > _SHOWN:
      lines.append(f"{kind}: {len(files) - _SHOWN} more files")
  common = [path for path in after if path in before]
  order = [path for path in before if path in after]
  if common != order:
    place = next(i for i, (a, b) in enumerate(zip(order, common)) if a != b)
    lines.append(f"reordered: {order[place]} came before {common[place]}, and now comes after it")
  return lines


def _checksums_differ(a: index_lib.OlmoNpyFileEntry, b: index_lib.OlmoNpyFileEntry) -> bool:
  """Returns whether checksums show different content; those of two algorithms cannot."""
  algorithms = {(entry.checksum or "").partition(":")[0] for entry in (a, b)}
  return len(algorithms) == 1 and a.checksum != b.checksum


def _by_name(index: index_lib.OlmoNpyIndex) -> dict[str, index_lib.OlmoNpyFileEntry]:
  """Returns the files by path; the second and later occurrences of a path are numbered."""
  counts: collections.Counter[str] = collections.Counter()
  found = {}
  for entry in index.files:
    counts[entry.path] += 1
    number = counts[entry.path]
    found[entry.path if number == 1 else f"{entry.path}, occurrence {number}"] = entry
  return found


def _head(entry: index_lib.OlmoNpyFileEntry) -> str:
  return "all" if entry.head_tokens is None else f"{entry.head_tokens:,}"
