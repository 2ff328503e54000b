"""What became of a corpus: which files were added, removed, grown, shrunk, replaced or moved between two indexes."""

from __future__ import annotations

from collections.abc import Sequence

from maxtext_olmo.corpus import index as index_lib

_SHOWN = 10


def find_prefix(index: index_lib.OlmoNpyIndex, fingerprint: str) -> int | None:
  """How many files, from the first, make the corpus of a fingerprint; None where no number does."""
  window = index.max_target_sequence_length or index.sequence_length
  found = index_lib.prefix_fingerprints(window, index.dtype, index.tokenizer, index.files)
  return next((count for count, prefix in enumerate(found) if prefix == fingerprint), None)


def windows_of_prefix(index: index_lib.OlmoNpyIndex, num_files: int) -> int:
  """The windows of the first `num_files` files."""
  if num_files >= len(index.files):
    return index.num_windows
  return index.files[num_files].instance_offset // index.chunk_size


def describe_changes(old: index_lib.OlmoNpyIndex, new: index_lib.OlmoNpyIndex) -> list[str]:
  """One line for each way in which the corpus is another; empty where the fingerprints agree."""
  lines = []
  for name in ("dtype", "tokenizer"):
    if getattr(old, name) != getattr(new, name):
      lines.append(f"{name}: was {getattr(old, name)!r}, is {getattr(new, name)!r}")
  was, now = (i.max_target_sequence_length or i.sequence_length for i in (old, new))
  if was != now:
    lines.append(
        f"windows: files were cut into windows of {was} tokens, now of {now}, which makes other instances; a corpus"
        " whose sequence length is to change is indexed with --max-target-sequence-length"
    )
  before = {entry.path: entry for entry in old.files}
  after = {entry.path: entry for entry in new.files}
  kinds: dict[str, list[str]] = {
      "removed": [],
      "grown": [],
      "shrunk": [],
      "replaced": [],
      "added": [],
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
    elif found.data_offset != entry.data_offset or (
        found.checksum and entry.checksum and found.checksum != entry.checksum
    ):
      kinds["replaced"].append(f"{path} (the same size, another content)")
  for place, (path, entry) in enumerate(after.items()):
    if path not in before:
      where = "at the end" if _all_new(list(after)[place:], before) else f"at place {place}"
      kinds["added"].append(f"{path} ({entry.size_bytes:,} bytes, {where})")
  for kind, files in kinds.items():
    lines += [f"{kind}: {file}" for file in files[:_SHOWN]]
    if len(files) > _SHOWN:
      lines.append(f"{kind}: {len(files) - _SHOWN} more files")
  common = [path for path in after if path in before]
  order = [path for path in before if path in after]
  if common != order:
    place = next(i for i, (a, b) in enumerate(zip(order, common)) if a != b)
    lines.append(f"reordered: {order[place]} came before {common[place]}, now it comes after")
  return lines


def _all_new(paths: Sequence[str], before: dict[str, index_lib.OlmoNpyFileEntry]) -> bool:
  return not any(path in before for path in paths)
