"""Finds the token files that an OLMo-core config names, in the order in which the run reads them.

A config has a mix, a list of paths or patterns, or a source mixture:

    mix        lines of a manifest, below `mix_base_dir`
    paths      as listed; with `expand_glob`, the sorted matches of each pattern
    mixture    the files of each source; a path with a `*` stands for its sorted matches

Then `source_permutation_seed` shuffles the files of a mix or a list. If the files have moved to
another machine, `base` replaces `mix_base_dir` or the common directory of all paths.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Sequence

from maxtext_olmo import errors
from maxtext_olmo.corpus import manifest
from maxtext_olmo.corpus import paths as paths_lib
from maxtext_olmo.corpus import patterns
from maxtext_olmo.corpus import source_mixture
from maxtext_olmo.loader import olmo_core_config
from maxtext_olmo.loader import olmo_core_import

_DOLMA2 = "allenai/dolma2-tokenizer"
_NEOX = "allenai/gpt-neox-olmo-dolma-v1_5"
_SIGDIG = "allenai/dolma2-tokenizer-sigdig"

# For each mix of OLMo-core, the names that replace {TOKENIZER} in its paths, keyed by tokenizer.
# Tokenizers that are not listed keep their name. The directories of OLMo 3 use a newer name for the
# same tokenizer.
_OLMO_3 = {_DOLMA2: "allenai/dolma3-tokenizer"}
_PLAIN = {_NEOX: "gpt-neox-olmo-dolma-v1_5"}
_VALIDATION = {_DOLMA2: "dolma2-tokenizer", _NEOX: "gptneox20b"}
MIXES: dict[str, dict[str, str]] = {
    "OLMoE-mix-0824": _PLAIN,
    "OLMoE-mix-0824-dev": _PLAIN,
    "dolma17": _PLAIN,
    "OLMo-mix-0625": {_SIGDIG: "dolma2-tokenizer-sigdig"},
    "OLMo-mix-0625-150Bsample": _PLAIN,
    "OLMo-mix-0625-700Bsample": _PLAIN,
    "OLMo-mix-0625-official": _OLMO_3,
    "OLMo-mix-0925": _PLAIN,
    "OLMo-mix-0925-official": _OLMO_3,
    "OLMo-midtraining-mix-0625-100B": _OLMO_3,
    "OLMo-midtraining-mix-0925-ingredient1-100B": _OLMO_3,
    "OLMo-midtraining-mix-0925-ingredient2-100B": _OLMO_3,
    "OLMo-longmino-mix-0625": _OLMO_3,
    "OLMo-longmino-mix-0925": _OLMO_3,
    "v3-small-ppl-validation": _VALIDATION,
    "c4-ppl-validation": _VALIDATION,
    "code-fresh-ppl-validation": {_DOLMA2: "dolma2-tokenizer"},
}
_ALIASES = {
    "dolma3-0625-6T-mix": "OLMo-mix-0625",
    "dolma3-0925-6T-mix": "OLMo-mix-0925",
    "dolma3-0925-150B-mix": "OLMo-mix-0625-150Bsample",
}


@dataclasses.dataclass(frozen=True)
class Files:
  """The files of a run.

  Attributes:
    base: Directory or URL that contains all paths; empty if there is none.
    paths: Full path of each token file, in stream order.
    labels: Label of each token file.
    masks: Full path of each label mask, in the unshuffled order of the files; None if there are no
      masks.
    sources: Sources of a source mixture, with their files; empty if the run has none.
    origin: Description of where the list of files came from.
  """

  base: str
  paths: tuple[str, ...]
  labels: tuple[str, ...]
  masks: tuple[str, ...] | None = None
  sources: tuple[source_mixture.MixtureSource, ...] = ()
  origin: str = ""


def find_files(
    run: olmo_core_config.RunConfig,
    *,
    base: str | os.PathLike[str] | None = None,
    mix_file: str | os.PathLike[str] | None = None,
    near: str = "",
) -> Files:
  """Returns the files of a run.

  Args:
    run: The config.
    base: Directory or URL of the files on this machine; by default, the one in the config.
    mix_file: Manifest of a named mix; by default, the file NAME.txt in the directory `near`, in the
      current directory, or in an installed OLMo-core.
    near: Directory of the config.
  """
  new_base = None if base is None else paths_lib.absolute(base)
  if run.mix:
    files = _files_of_mix(run, new_base, mix_file, near)
  elif run.mixture:
    files = _files_of_mixture(run, new_base)
  else:
    files = _files_of_paths(run, new_base)
  if files.masks is not None and len(files.masks) != len(files.paths):
    raise errors.ConfigError(
        f"The config names {len(files.masks)} label masks for {len(files.paths)} token files. Each"
        " token file needs one mask: the n-th mask belongs to the n-th file."
    )
  if run.permutation_seed is None or run.mixture:  # OLMo-core does not shuffle a mixture.
    return files
  listed = list(zip(files.paths, files.labels))
  paths, labels = zip(*olmo_core_import.permute_sources(listed, run.permutation_seed))
  return dataclasses.replace(files, paths=paths, labels=labels)


def _files_of_mix(
    run: olmo_core_config.RunConfig,
    base: str | None,
    mix_file: str | os.PathLike[str] | None,
    near: str,
) -> Files:
  base = base or paths_lib.absolute(run.mix_base_dir)
  found = os.fspath(mix_file) if mix_file is not None else _find_manifest(run.mix, near)
  tokenizer = tokenizer_of_mix(run.mix, run.tokenizer)
  entries = manifest.read_mix(found, tokenizer=tokenizer)
  manifest.check_inside(entries, found, base)
  return Files(
      base=base,
      paths=tuple(paths_lib.join(base, entry.path) for entry in entries),
      labels=tuple(entry.label for entry in entries),
      masks=run.mask_paths,
      origin=f"mix {run.mix}, from {found}",
  )


def tokenizer_of_mix(mix: str, tokenizer: str) -> str:
  """Returns the name that replaces {TOKENIZER} in the paths of a mix.

  >>> tokenizer_of_mix("OLMo-mix-0925-official", "allenai/dolma2-tokenizer")
  'allenai/dolma3-tokenizer'
  """
  return MIXES.get(_ALIASES.get(mix, mix), {}).get(tokenizer, tokenizer)


def _find_manifest(mix: str, near: str) -> str:
  name = f"{_ALIASES.get(mix, mix)}.txt"
  folders = [near, os.getcwd()]
  package = importlib.util.find_spec("olmo_core")
  if package is not None and package.submodule_search_locations:
    folders += [os.path.join(path, "data", "mixes") for path in package.submodule_search_locations]
  for folder in filter(None, folders):
    if os.path.isfile(path := os.path.join(folder, name)):
      return path
  known = "one of OLMo-core's" if _ALIASES.get(mix, mix) in MIXES else "not one of OLMo-core's"
  raise errors.MissingFileError(
      f"The mix {mix!r} is {known}, and its manifest {name} is not in"
      f" {', '.join(filter(None, folders))}. Copy it from OLMo-core (src/olmo_core/data/mixes), or"
      " name it (--mix-file)."
  )


def _files_of_paths(run: olmo_core_config.RunConfig, base: str | None) -> Files:
  given = run.mask_paths or ()
  old = _common_directory([*run.paths, *given])
  paths, masks = ([_moved(path, old, base) for path in some] for some in (run.paths, given))
  if run.expand_glob:
    paths = [match for pattern in paths for match in patterns.expand(pattern)]
    masks = [match for pattern in masks for match in patterns.expand(pattern)]
  if run.labels is not None and len(run.labels) != len(paths):
    raise errors.ConfigError(
        f"The config has metadata for {len(run.labels)} files, but its patterns match"
        f" {len(paths)} files. Copy all files of the run, and no others, to this machine."
    )
  return Files(
      base=base or old,
      paths=tuple(paths),
      labels=run.labels or tuple(_directory_name(path) for path in paths),
      masks=None if run.mask_paths is None else tuple(masks),
      origin=f"{'patterns' if run.expand_glob else 'paths'}: {len(run.paths)}",
  )


def _files_of_mixture(run: olmo_core_config.RunConfig, base: str | None) -> Files:
  sources, base = resolve_sources(run.mixture, base)
  return Files(
      base=base,
      paths=tuple(path for source in sources for path in source.paths),
      labels=tuple(source.name for source in sources for _ in source.paths),
      sources=sources,
      origin=f"source mixture of {len(sources)} sources",
  )


def resolve_sources(
    sources: Sequence[source_mixture.MixtureSource], base: str | None
) -> tuple[tuple[source_mixture.MixtureSource, ...], str]:
  """Returns sources with files in place of patterns, and the directory that contains the files."""
  old = _common_directory([path for source in sources for path in source.paths])
  resolved = []
  for source in sources:
    files: list[str] = []
    for path in (_moved(path, old, base) for path in source.paths):
      files += patterns.expand(path) if "*" in path else [path]
    resolved.append(dataclasses.replace(source, paths=tuple(files)))
  return tuple(resolved), base or old


def _common_directory(given: Sequence[str]) -> str:
  """Returns the directory that paths or patterns have in common."""
  return paths_lib.common_base(f"{patterns.fixed_directory(path)}/" for path in map(_full, given))


def _moved(path: str, old: str, new: str | None) -> str:
  """Returns a path with the directory `old` replaced by `new`, unless `new` is None."""
  path = _full(path)
  return path if new is None else paths_lib.join(new, path.removeprefix(old).lstrip("/"))


def _full(path: str) -> str:
  return path if paths_lib.is_url(path) else os.path.abspath(path)


def _directory_name(path: str) -> str:
  return os.path.basename(os.path.dirname(path)) or "data"
