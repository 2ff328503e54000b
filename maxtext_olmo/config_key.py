"""A configuration key: its name, type, default, help and check, and how its value is read.

The table in `config` has the bounds and choices of each single value; the checks below find
combinations of values that cannot work together.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.util
import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict
from ml_collections import config_dict

from maxtext_olmo import errors
from maxtext_olmo.corpus import urls
from maxtext_olmo.order import permutations

# Returns what is wrong with a value, such as "must be at least 0"; empty if the value is valid.
Check = Callable[[Any], str]

GRAIN, DOCUMENTS, PACKED = "olmo_grain", "olmo_documents", "olmo_packed"
PADDED, SYNTHETIC = "olmo_padded", "synthetic"
DATASET_TYPES = (GRAIN, DOCUMENTS, PACKED, PADDED, SYNTHETIC)

WRONG_TYPE = (AttributeError, TypeError, ValueError, OverflowError)


# More than any run has; sums and products of a few such numbers still fit into 64 bits.
_MOST = 2**53
_MOST_TEXT = 4096
_PACKAGES_FOR_GCS = ("gcsfs", "tensorflow")  # Either lets `epath` reach gs:// buckets.
MOST_ROWS = 2**24
MOST_TOKENS = 2**32


def at_least(bound: float, most: float = _MOST) -> Check:
  """Checks a lower bound, and an upper bound that only a mistake exceeds."""

  def check(value: float) -> str:
    if value > most:
      return f"must be at most {most}"
    return "" if value >= bound else f"must be at least {bound}"

  return check


def more_than(bound: float) -> Check:
  """Checks an exclusive lower bound."""
  return lambda value: "" if value > bound else f"must be more than {bound}"


def one_of(*choices: str) -> Check:
  """Checks that a value is among some choices."""
  return lambda value: "" if value in choices else f"must be one of {', '.join(choices)}"


def some_of(*choices: str) -> Check:
  """Checks that every item of a list is among some choices."""
  expected = f"may list only {', '.join(choices)}"
  return lambda value: "" if all(item in choices for item in value) else expected


class Kind(NamedTuple):
  """A type of value.

  Attributes:
    description: Name of the type in an error, as in "should be a whole number".
    python_type: Type to declare in a config with declared types, such as MaxText's.
    read: Converts a value; raises TypeError, ValueError or the like for a value of another type.
  """

  description: str
  python_type: type
  read: Callable[[Any], Any]


def read_number(value: Any) -> float:
  """Converts an int or float, NumPy's included, to a float."""
  if isinstance(value, bool) or not isinstance(value, numbers.Real):
    raise TypeError(f"{value!r} is not a number.")
  return float(value)


def read_whole_number(value: Any) -> int:
  """Converts an int, or a float without a fraction, NumPy's included, to an int."""
  if read_number(value) != int(value) or abs(int(value)) >= 2**64:
    raise ValueError(f"{value!r} is not a whole number below 2**64.")
  return int(value)


def _read_boolean(value: Any) -> bool:
  if not isinstance(value, (bool, np.bool_)):
    raise TypeError(f"{value!r} is not a boolean.")
  return bool(value)


def _read_text(value: Any) -> str:
  text = os.fspath(value.value if isinstance(value, enum.Enum) else value)
  if not isinstance(text, str) or "\0" in text or len(text) > _MOST_TEXT:
    raise TypeError("The value is not text, contains a NUL, or is too long for a path.")
  text.encode()  # Raises for surrogates, which no file system accepts.
  return text


def _read_list(value: Any) -> tuple[Any, ...]:
  if isinstance(value, str) or not isinstance(value, Sequence):
    raise TypeError(f"{value!r} is not a list.")
  return tuple(value)


def show(value: Any) -> str:
  """Returns the text of a value for an error, cut to 200 characters and without credentials."""
  text = urls.redact(repr(value))
  return text if len(text) <= 200 else f"{text[:200]}… ({len(text)} characters)"


BOOLEAN = Kind("true or false", bool, _read_boolean)
TEXT = Kind(f"text of at most {_MOST_TEXT} characters, without NUL", str, _read_text)
TEXTS = Kind("a list of texts", list, lambda value: tuple(map(_read_text, _read_list(value))))
_KINDS = {
    bool: BOOLEAN,
    int: Kind("a whole number below 2**64", int, read_whole_number),
    float: Kind("a number", float, read_number),
    str: TEXT,
    tuple: Kind("a list", list, _read_list),
}


@dataclasses.dataclass(frozen=True)
class Key:
  """A configuration key.

  Attributes:
    name: Name of the key.
    default: Value in a config that does not set the key.
    help: Description of the key, in a sentence or two.
    check: Returns what is wrong with a value of the right type; empty if it is valid.
    read_by: Dataset types of this package that read the key; not used for a trainer's own keys.
    per_host: Whether the hosts of a run may have different values.
    kind: Type of the values; by default, the type of `default`.
    default_by_type: If `default` is None, the default for each dataset type.
  """

  name: str
  default: Any
  help: str
  check: Check | None = None
  _: dataclasses.KW_ONLY
  read_by: tuple[str, ...] = DATASET_TYPES
  per_host: bool = False
  kind: Kind = None  # type: ignore[assignment]  # Set below.
  default_by_type: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    if self.kind is None:
      object.__setattr__(self, "kind", _KINDS[type(self.default)])

  @property
  def default_text(self) -> str:
    """The default as Markdown, for help and guides."""
    by_type = [f"`{value!r}` for {name}" for name, value in self.default_by_type.items()]
    return ", ".join(by_type) or f"`{self.default!r}`"

  def is_set(self, config: Any) -> bool:
    """Returns whether a config sets a value other than the default."""
    value = getattr(config, self.name, None)
    try:
      return value is not None and self.kind.read(value) != self.default
    except WRONG_TYPE:
      return True


def read_values(config: Any, keys: Iterable[Key]) -> tuple[dict[str, Any], dict[str, str]]:
  """Reads keys of a config, with defaults for those that are missing or None.

  Returns:
    The values by name, and the problems by name. A value of the wrong type becomes the default, so
    that values can be compared with each other even if there are problems.
  """
  values: dict[str, Any] = {}
  problems: dict[str, str] = {}
  for key in keys:
    value = getattr(config, key.name, None)
    values[key.name] = key.default
    if value is None:
      continue
    try:
      values[key.name] = _clean(key.kind.read(value))
    except WRONG_TYPE:
      problems[key.name] = f"{key.name}={show(value)} should be {key.kind.description}."
      continue
    problem = key.check(values[key.name]) if key.check else ""
    if problem:
      problems[key.name] = f"{key.name}={show(values[key.name])} {problem}."
  return values, problems


def _clean(value: Any) -> Any:
  """Returns a value without the credentials that URLs in it may carry; they are kept apart."""
  if isinstance(value, str):
    return urls.clean_text(value)
  if isinstance(value, Mapping):
    return {key: _clean(item) for key, item in value.items()}
  if isinstance(value, tuple) and any(isinstance(item, (str, Mapping)) for item in value):
    return tuple(_clean(item) for item in value)
  return value


def problems(options: Any, defaults: Mapping[str, Any]) -> Iterator[str]:
  """Yields a sentence for each combination of values that cannot work together.

  Args:
    options: A `config.Options`.
    defaults: The default of each key.
  """
  yield from _batch_sizes(options)
  yield from _schedule(options)
  yield from _checkpoints(options)
  if options.dataset_type != SYNTHETIC and options.dataset_type in DATASET_TYPES:
    yield from _corpus(options)
  if options.dataset_type == GRAIN:
    yield from _windows(options)
  if options.dataset_type == DOCUMENTS:
    yield from _documents(options, defaults)
  if options.dataset_type in (PACKED, PADDED):
    yield from _packed_or_padded(options)
  if options.dataset_type == PACKED:
    yield from _packed(options)


def _batch_sizes(options: Any) -> Iterator[str]:
  for used, loaded in (
      ("global_batch_size_to_train_on", "global_batch_size_to_load"),
      ("global_batch_size_to_eval_on", "global_batch_size_to_load_eval"),
  ):
    if getattr(options, used) > getattr(options, loaded):
      yield f"{used}={getattr(options, used)} exceeds {loaded}={getattr(options, loaded)}."
    tokens = getattr(options, loaded) * options.max_target_length
    if tokens > MOST_TOKENS:
      yield (
          f"{loaded}={getattr(options, loaded)} rows of max_target_length="
          f"{options.max_target_length} are {tokens} tokens; a batch has at most {MOST_TOKENS}."
      )


def _schedule(options: Any) -> Iterator[str]:
  if options.olmo_batch_schedule and options.olmo_batch_rampup_factors:
    yield "olmo_batch_schedule and olmo_batch_rampup_factors are both set; set only one."
  name = "olmo_batch_schedule" if options.olmo_batch_schedule else "olmo_batch_rampup_factors"
  try:
    largest = options.schedule().sizes[-1]
    if largest * options.max_target_length > MOST_TOKENS:
      yield f"{name}: a batch of {largest} rows has more than {MOST_TOKENS} tokens."
  except errors.ConfigError as error:
    yield f"{name}: {error}"
  trained, loaded = options.global_batch_size_to_train_on, options.global_batch_size_to_load
  if options.has_batch_schedule and trained != loaded:
    yield (
        f"{name} needs global_batch_size_to_train_on={trained} to equal"
        f" global_batch_size_to_load={loaded}."
    )


def _checkpoints(options: Any) -> Iterator[str]:
  """Yields why checkpoints cannot be in a bucket."""
  directory = options.checkpoint_dir
  if not (options.enable_checkpointing and urls.is_url(directory)):
    return
  if directory.partition("://")[0] not in urls.GCS:
    yield (
        f"checkpoint_dir={show(directory)} is a URL, but Orbax completes a checkpoint atomically"
        " only on a file system and in gs:// buckets; elsewhere, a killed save could look complete."
        " Use a shared file system or gs://, or set enable_checkpointing=False and keep the state"
        " of the iterator (get_state) with your own checkpoints."
    )
  elif not any(map(importlib.util.find_spec, _PACKAGES_FOR_GCS)):
    yield (
        f"checkpoint_dir={show(directory)} needs gcsfs, with which Orbax reaches gs:// buckets, and"
        " which is not installed: run `pip install gcsfs`."
    )


def _corpus(options: Any) -> Iterator[str]:
  for first, end in options.olmo_skip:
    if not 0 <= first < end < 1 << 62:
      yield f"olmo_skip: a range begins at 0 or later and ends after that, got {first} to {end}."
  if not options.olmo_index_path:
    yield "olmo_index_path is empty; build an index with `maxtext-olmo index build`."
  for one, other in (("to", "from"), ("from", "to")):
    if getattr(options, f"olmo_path_remap_{one}") and not getattr(
        options, f"olmo_path_remap_{other}"
    ):
      yield f"olmo_path_remap_{one} is set without olmo_path_remap_{other}; set both or neither."
  for name in ("olmo_eos_id", "olmo_bos_id", "olmo_pad_id"):
    token = getattr(options, name)
    if options.vocab_size and token >= options.vocab_size:
      yield f"{name}={token} is outside the vocabulary: vocab_size={options.vocab_size}."
  if options.olmo_ngram_min_period > options.olmo_ngram_max_period:
    yield (
        f"olmo_ngram_min_period={options.olmo_ngram_min_period} exceeds olmo_ngram_max_period="
        f"{options.olmo_ngram_max_period}."
    )


def _like_olmo_core(options: Any) -> Iterator[str]:
  order = options.order_name
  if options.olmo_order_resume == "olmo_core" and order != "olmo_core":
    yield f"olmo_order_resume='olmo_core' needs olmo_order='olmo_core', not {order!r}."
  if options.olmo_document_mask and options.olmo_eos_id < 0:
    yield "olmo_document_mask needs olmo_eos_id, the token that ends a document."
  if options.olmo_label_masks_seed >= 0 and not options.olmo_label_masks:
    yield "olmo_label_masks_seed is set without olmo_label_masks."


def _packed_or_padded(options: Any) -> Iterator[str]:
  yield from _like_olmo_core(options)
  name = options.dataset_type
  if options.olmo_pad_id < 0:
    yield f"dataset_type={name} needs olmo_pad_id, the token that fills rows."
  if options.olmo_eos_id < 0 and (options.olmo_boundaries == "eos" or name == PADDED):
    unless = "" if name == PADDED else ", unless olmo_boundaries='csv'"
    yield f"dataset_type={name} needs olmo_eos_id{unless}."
  if options.eval_interval > 0 and not options.olmo_eval_index_path:
    yield f"eval_interval={options.eval_interval} needs olmo_eval_index_path."


def _packed(options: Any) -> Iterator[str]:
  if options.olmo_long_documents == "error":
    yield "olmo_long_documents='error': olmo_packed needs 'truncate' or 'split'."
  if (options.olmo_packing_ties == "cache") != bool(options.olmo_packing_cache_dir):
    yield "olmo_packing_ties='cache' and olmo_packing_cache_dir need each other; set both."


def _windows(options: Any) -> Iterator[str]:
  order = options.order_name
  yield from _like_olmo_core(options)
  if options.olmo_label_masks and options.olmo_stages:
    yield "olmo_label_masks and olmo_stages are both set; masks pair with one index only."
  if options.eval_interval > 0 and not (
      options.olmo_eval_index_path or options.olmo_eval_instances
  ):
    yield (
        f"eval_interval={options.eval_interval} needs olmo_eval_index_path or olmo_eval_instances."
    )
  if options.olmo_eval_instances and options.olmo_eval_index_path:
    yield "olmo_eval_index_path and olmo_eval_instances are both set; set only one."
  known = order in permutations.order_names()
  if options.olmo_eval_instances and known and permutations.order_class(order).foreign:
    yield (
        f"olmo_eval_instances={options.olmo_eval_instances} cannot be held out of the {order}"
        " order, which is exact over the whole corpus; evaluate on olmo_eval_index_path."
    )
  if options.olmo_eval_instances and options.olmo_consumed_path:
    yield (
        "olmo_eval_instances cannot hold out instances that were consumed already"
        " (olmo_consumed_path); evaluate on olmo_eval_index_path."
    )
  if options.olmo_mixture and options.olmo_consumed_path:
    yield "olmo_mixture and olmo_consumed_path are both set; a mixture draws on whole labels."
  if options.olmo_mixture and options.olmo_allow_corpus_change != "no":
    yield (
        "olmo_mixture needs olmo_allow_corpus_change='no', not"
        f" {options.olmo_allow_corpus_change!r}: a changed corpus has labels of other sizes, and so"
        " another order."
    )


def _documents(options: Any, defaults: Mapping[str, Any]) -> Iterator[str]:
  if options.order_name not in ("feistel", "sequential"):
    yield f"olmo_order={options.olmo_order!r}: olmo_documents needs feistel or sequential."
  if options.olmo_eos_id < 0:
    yield "dataset_type=olmo_documents needs olmo_eos_id, the token that ends a document."
  if options.eval_interval > 0 and not options.olmo_eval_index_path:
    yield f"eval_interval={options.eval_interval} needs olmo_eval_index_path."
  last = options.olmo_stages[-1] if options.olmo_stages else {}
  if last.get("olmo_mixture", options.olmo_mixture) and options.olmo_num_epochs:
    yield "olmo_mixture over documents has no end: it needs olmo_num_epochs=0."
  if options.random_access_documents:
    return
  # All other packings stream: a row depends on the rows before it and has no position of its own.
  needs_positions = {
      "initial_step": options.initial_step > 0,
      "olmo_initial_position": options.olmo_initial_position > 0,
      "olmo_mixture": bool(options.olmo_mixture),
      "olmo_apply_ngram_filter": options.olmo_apply_ngram_filter,
      "olmo_batch_extras": bool(options.olmo_batch_extras),
      "olmo_exclude": bool(options.olmo_exclude),
      "olmo_skip": bool(options.olmo_skip),
      "olmo_stages": bool(options.olmo_stages),
      "olmo_allow_mixture_change": options.olmo_allow_mixture_change,
      "olmo_spool_dir": bool(options.olmo_spool_dir),
      "olmo_batch_schedule_unit": options.olmo_batch_schedule_unit == "tokens",
      "generate_padding_batch_train": options.generate_padding_batch_train,
      "global_batch_size_to_train_on": (
          options.global_batch_size_to_train_on != options.global_batch_size_to_load
      ),
  }
  for name in ("olmo_prefetch_batches", "olmo_device_prefetch"):
    needs_positions[name] = getattr(options, name) != defaults[name]
  for name in (name for name, needed in needs_positions.items() if needed):
    yield (
        f"{name}={getattr(options, name)!r} needs rows that are addressed by position:"
        " olmo_shard='batch' and olmo_packing='planned', or 'none' with olmo_long_documents other"
        " than 'split'."
    )


def make_config(keys: Iterable[Key]) -> ConfigDict:
  """Returns a locked config with some keys at their defaults."""
  return ConfigDict({key.name: _default(key) for key in keys}).lock()


def _default(key: Key) -> Any:
  # A placeholder has a type, so that the command line can set it.
  return config_dict.placeholder(key.kind.python_type) if key.default is None else key.default
