"""Reads and checks the value of `olmo_stages`, such as:

    ({"from_step": 1000, "olmo_mixture": {"code": 0.6, "web": 0.4}, "olmo_mixture_unit": "weights"},
     {"from_tokens": 10**12, "olmo_index_path": "mid.json", "data_shuffle_seed": 7})

A stage overrides some keys of the config; all others keep the config's values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from maxtext_olmo import config_key
from maxtext_olmo.order import mixture
from maxtext_olmo.order import permutations

BEGINNINGS = ("from_step", "from_tokens")
MIXTURE = config_key.Kind(
    "a dict from label to number",
    dict,
    lambda value: {str(label): config_key.read_number(share) for label, share in value.items()},
)
_KEYS = {
    key.name: key
    for key in (
        config_key.Key("from_step", 0, "", config_key.at_least(1)),
        config_key.Key("from_tokens", 0, "", config_key.at_least(1, 2**62)),
        config_key.Key("olmo_index_path", "", ""),
        config_key.Key("olmo_order", "", "", config_key.one_of(*permutations.order_names())),
        config_key.Key("data_shuffle_seed", 0, ""),
        config_key.Key("olmo_mixture", {}, "", kind=MIXTURE),
        config_key.Key("olmo_mixture_unit", "", "", config_key.one_of(*mixture.UNITS)),
        config_key.Key("leave_out_seen", False, ""),
    )
}

Stage = dict[str, Any]


def _read(value: Any) -> tuple[Stage, ...]:
  if isinstance(value, (str, Mapping)) or not isinstance(value, Sequence):
    raise TypeError(f"{value!r} is not a list.")
  stages = []
  for stage in value:
    read = {str(name): item for name, item in stage.items()}
    for name, item in read.items():
      try:
        read[name] = _KEYS[name].kind.read(item)
      except (KeyError, *config_key.WRONG_TYPE):
        pass  # `problems` reports what is wrong with the value.
    stages.append(dict(sorted(read.items())))
  return tuple(stages)


STAGES = config_key.Kind("a list of dicts, one for each stage", list, _read)


def _problems(stages: Sequence[Stage]) -> Iterator[str]:
  for number, stage in enumerate(stages, 1):
    name = f"olmo_stages: stage {number}"
    given = [key for key in BEGINNINGS if key in stage]
    if len(given) != 1:
      yield f"{name} needs exactly one of {' and '.join(BEGINNINGS)}."
    for key, value in stage.items():
      if key not in _KEYS:
        yield f"{name} sets {config_key.show(key)}; a stage may set {', '.join(_KEYS)}."
        continue
      try:
        _KEYS[key].kind.read(value)
      except config_key.WRONG_TYPE:
        yield f"{name}: {key}={config_key.show(value)} should be {_KEYS[key].kind.description}."
        continue
      problem = _KEYS[key].check(value) if _KEYS[key].check else ""  # type: ignore[misc]
      if problem:
        yield f"{name}: {key}={config_key.show(value)} {problem}."
    if set(stage) == set(given):
      yield f"{name} sets only where it begins. Set the keys that change, or remove the stage."
  for beginning in BEGINNINGS:
    firsts = [stage[beginning] for stage in stages if type(stage.get(beginning)) is int]
    if any(a >= b for a, b in zip(firsts, firsts[1:])):
      yield f"olmo_stages: {beginning} must increase from stage to stage, got {firsts}."


def problems(options: Any) -> Iterator[str]:
  """Yields a sentence for each combination of stages and other keys that cannot work."""
  found = list(_problems(options.olmo_stages))
  if found:
    yield from found
    return
  changed = options.olmo_allow_corpus_change
  if options.olmo_stages and changed != "no":
    yield (
        f"olmo_stages needs olmo_allow_corpus_change='no', not {changed!r}: the corpus of a run"
        " with stages must not change."
    )
  for number, stage in enumerate(options.olmo_stages, 1):
    order = stage.get("olmo_order", options.order_name)
    if order not in permutations.order_names():
      continue
    if options.dataset_type == config_key.DOCUMENTS:
      yield from _problems_of_documents(number, order, stage)
      continue
    cls = permutations.order_class(order)
    if options.olmo_eval_instances and cls.foreign:
      yield (
          f"olmo_stages: stage {number}: olmo_eval_instances={options.olmo_eval_instances} cannot"
          f" be held out of the {order} order, which always covers the whole corpus; evaluate on"
          " olmo_eval_index_path."
      )
    if stage.get("leave_out_seen") and cls.drops_tails:
      yield (
          f"olmo_stages: stage {number}: leave_out_seen does not work with olmo_order={order!r},"
          " whose batches never span epochs; use feistel or sequential."
      )


def _problems_of_documents(number: int, order: str, stage: Stage) -> Iterator[str]:
  if order not in ("feistel", "sequential"):
    yield (
        f"olmo_stages: stage {number}: olmo_order={order!r}: olmo_documents needs feistel or"
        " sequential."
    )
  if stage.get("leave_out_seen"):
    yield (
        f"olmo_stages: stage {number}: leave_out_seen needs dataset_type=olmo_grain: each stage"
        " packs documents into different rows, so the rows seen in earlier stages do not exist in"
        " this one. Remove leave_out_seen, or give the stage an index of files that the run has not"
        " read."
    )
