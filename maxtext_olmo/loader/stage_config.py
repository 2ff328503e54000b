"""Builds the stage policy of a config: reads `olmo_stages`, opens its indexes, checks stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from maxtext_olmo import config as config_lib
from maxtext_olmo import config_stages
from maxtext_olmo import errors
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import paths
from maxtext_olmo.loader import stages
from maxtext_olmo.order import corpora as corpora_lib
from maxtext_olmo.order import stages as stages_lib


def policy_of(
    options: config_lib.Options,
    base: index_lib.OlmoNpyIndex,
    open_index: Callable[[str], index_lib.OlmoNpyIndex],
) -> stages.StagePolicy:
  """Returns the stage policy of a config with `dataset_type=olmo_grain`.

  Args:
    options: The data keys of the run.
    base: The index that `options.olmo_index_path` names.
    open_index: Opens the index at a path, for stages that name their own index.
  """
  settings, requests, indexes = read_stages(options, base, open_index)
  corpora = corpora_lib.Corpora(
      base,
      indexes,
      options.olmo_eval_instances,
      options.olmo_order_cache_dir,
      options.olmo_consumed_path,
  )
  policy = stages.StagePolicy(
      settings,
      requests,
      corpora,
      options.olmo_num_epochs or None,
      options.olmo_allow_mixture_change,
  )
  return checked(policy)


def read_stages(
    options: config_lib.Options,
    base: index_lib.OlmoNpyIndex,
    open_index: Callable[[str], index_lib.OlmoNpyIndex],
    documents: Callable[[index_lib.OlmoNpyIndex], str] = lambda index: "",
) -> tuple[stages_lib.Settings, tuple[stages.Request, ...], dict[str, index_lib.OlmoNpyIndex]]:
  """Reads the stages of a config.

  Args:
    options: The data keys of the run.
    base: The index that `options.olmo_index_path` names.
    open_index: Opens the index at a path, for stages that name their own index.
    documents: Returns the checksum of an index's documents; needed if rows are made of documents.

  Returns:
    The settings that a run begins with, the stages that the config asks for, and the indexes of
    both, keyed by fingerprint.
  """
  own = {
      "olmo_index_path": options.olmo_index_path,
      "olmo_order": options.order_name,
      "data_shuffle_seed": options.data_shuffle_seed,
      "olmo_mixture": options.olmo_mixture,
      "olmo_mixture_unit": options.olmo_mixture_unit,
  }
  indexes: dict[str, index_lib.OlmoNpyIndex] = {options.olmo_index_path: base}
  requests = []
  for number, stage in enumerate(options.olmo_stages, 1):
    values = {**own, **stage}
    path = values["olmo_index_path"]
    try:
      if path not in indexes:
        indexes[path] = _like(open_index(path), base)
      unit = next(name for name in config_stages.BEGINNINGS if name in stage)
      settings = _settings(values, indexes[path], documents(indexes[path]))
    except (errors.ConfigError, errors.CorpusError) as error:
      raise errors.ConfigError(f"olmo_stages: stage {number}: {error}") from error
    requests.append(stages.Request(unit.removeprefix("from_"), stage[unit], settings))
  by_fingerprint = {index.fingerprint: index for index in indexes.values()}
  return _settings(own, base, documents(base)), tuple(requests), by_fingerprint


def checked(policy: stages.StagePolicy) -> stages.StagePolicy:
  """Returns a policy unchanged; raises ConfigError if one of the requested stages is impossible."""
  for number, request in enumerate(policy.requests, 1):
    try:
      policy.stream_alone(request.settings)
    except (errors.ConfigError, errors.CorpusError) as error:
      raise errors.ConfigError(f"olmo_stages: stage {number}: {error}") from error
  return policy


def _settings(
    values: dict[str, Any], index: index_lib.OlmoNpyIndex, documents: str
) -> stages_lib.Settings:
  mixture = stages_lib.mixture_pairs(values["olmo_mixture"])
  return stages_lib.Settings(
      order=values["olmo_order"],
      seed=values["data_shuffle_seed"],
      fingerprint=index.fingerprint,
      index_path=paths.absolute(values["olmo_index_path"]),
      mixture=mixture,
      unit=values["olmo_mixture_unit"] if mixture else "",
      leave_out_seen=values.get("leave_out_seen", False),
      documents=documents,
  )


def _like(index: index_lib.OlmoNpyIndex, base: index_lib.OlmoNpyIndex) -> index_lib.OlmoNpyIndex:
  """Returns an index unchanged; raises ConfigError if its token dtype differs from the run's."""
  if index.token_dtype != base.token_dtype:
    raise errors.ConfigError(
        f"its tokens are {index.dtype}, but those of the run are {base.dtype}. All stages need the"
        " same dtype: tokenize the corpus again."
    )
  return index
