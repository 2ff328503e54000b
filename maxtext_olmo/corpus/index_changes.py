"""The changes of a corpus between two indexes.

Files may have been added, removed, grown, shrunk, replaced or reordered.
"""

from __future__ import annotations

from maxtext_olmo.corpus import index as index_lib

_SHOWN = 10


def find_prefix(index: index_lib.OlmoNpyIndex, fingerprint: str) -> int | None:
  """Returns how many of the first files have this fingerprint; None where no number of them
  does."""
  window = index.max_target_sequence_length or index.sequence_length
  found = index_lib.prefix_fingerprints(window, index.dtype, index.tokenizer, index.files)
  return next((count for count, prefix in enumerate(found) if prefix == fingerprint), None)


def windows_of_prefix(index: index_lib.OlmoNpyIndex, num_files: int) -> int:
  """Returns the number of windows in the first `num_files` files."""
  if num_files >= len(index.files):
    return index.num_windows
  return index.files[num_files].instance_offset // index.chunk_size


def describe_changes(old: index_lib.OlmoNpyIndex, new: index_lib.OlmoNpyIndex) -> list[str]:
  """Returns a line for each difference; none where the fingerprints agree."""
  lines = []
  for name in ("dtype", "tokenizer"):
    if getattr(old, name) != getattr(new, name):
      lines.append(f"{name}: was {getattr(old, name)!r}, is {getattr(new, name)!r}")
  was, now = (i.max_target_sequence_length or i.sequence_length for i in (old, new))
  if was != now:
    lines.append(
        f"windows: files were cut into windows of {was} tokens, now of {now}, which makes other"
        " instances; index a corpus whose sequence length will change with"
        " --max-target-sequence-length"
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
    lines.append(f"reordered: {order[place]} came before {common[place]}, now it comes after")
  return lines
