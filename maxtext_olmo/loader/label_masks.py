"""The mask files of a fine-tuning corpus, which say which tokens count in the loss.

As in OLMo-core, masks are paired with token files by their order in the list: each pattern is
replaced by its sorted matches, and the n-th mask belongs to the n-th token file. If the token files
were shuffled when the index was built (`--source-permutation-seed`), the masks are shuffled in the
same way:

    token files     part_0.npy  part_1.npy  part_2.npy  ──▶  part_2.npy  part_0.npy  …
    mask files      mask_0.npy  mask_1.npy  mask_2.npy  ──▶  mask_2.npy  mask_0.npy  …

The target in column i of a row is token i + 1, so the mask of token i + 1 decides whether column i
counts in the loss.
"""

from __future__ import annotations

from maxtext_olmo import config as config_lib
from maxtext_olmo import errors
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import paths as paths_lib
from maxtext_olmo.corpus import patterns
from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.loader import olmo_core_import


def mask_paths(
    options: config_lib.Options, index: index_lib.OlmoNpyIndex
) -> tuple[str, ...] | None:
  """Returns the mask file of each token file; None if the options name no masks.

  Raises:
    ConfigError: There are more or fewer mask files than token files.
    MissingFileError: A pattern matches no file.
  """
  if not options.olmo_label_masks:
    return None
  found: list[str] = []
  storage = storage_lib.open_storage(options.store_options)
  for pattern in options.olmo_label_masks:
    path = paths_lib.remap(paths_lib.join(index.base, pattern), options.path_remap)
    found += patterns.expand(path, storage) if "*" in pattern else [path]
  if len(found) != len(index.files):
    raise errors.ConfigError(
        f"olmo_label_masks has {len(found)} files, but the index has {len(index.files)} token"
        " files. Each token file needs one mask file, in the same order."
    )
  if options.olmo_label_masks_seed >= 0:
    found = olmo_core_import.permute_sources(found, options.olmo_label_masks_seed)
  return tuple(found)
