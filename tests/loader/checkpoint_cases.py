"""Saves and restores every iterator of the package in each way that a trainer may do it."""

import itertools
import json
import pathlib

import grain
import jax
import ml_collections
import numpy as np
import orbax.checkpoint as ocp

import maxtext_olmo
from maxtext_olmo import config as config_lib
from maxtext_olmo import errors
from tests import corpora

_LENGTH = 32
_BATCH = 4
_STEPS = 2
_PACKINGS = ("planned", "none", "first_fit", "best_fit", "concat_then_split")

KINDS = (
    "olmo_grain",
    "olmo_grain eval",
    "synthetic",
    "olmo_documents eval",
    *(f"olmo_documents {p} {s}" for p, s in itertools.product(_PACKINGS, ("batch", "slice"))),
    "records planned slice",
    "records none slice",
    "records first_fit batch",
    "records concat_then_split slice",
    "records mixed",
    "records mixed_stream",
    "multihost dataset",
    "multihost loader",
)


def _mesh() -> jax.sharding.Mesh:
  return jax.sharding.Mesh(np.array(jax.devices()), ("data",))


def _records(count, first):
  rng = np.random.default_rng(first)
  return [{"inputs": np.append(rng.integers(1, 90, n), 99)} for n in rng.integers(1, 20, count)]


def _config(index_path, dataset_type, **values):
  return ml_collections.ConfigDict(
      {
          **config_lib.defaults(),
          "dataset_type": dataset_type,
          "olmo_index_path": "" if dataset_type == "synthetic" else index_path,
          "max_target_length": 8 if dataset_type == "olmo_grain" else _LENGTH,
          "global_batch_size_to_load": _BATCH,
          "vocab_size": 100,
          **values,
      }
  )


def _from_config(index_path, dataset_type, *rest):
  values = {}
  if dataset_type == "olmo_documents":
    values = {"olmo_eos_id": 0, "olmo_packing_bins": 8}
  if rest == ("eval",):
    held_out = {"olmo_eval_instances": 40}
    values |= held_out if dataset_type == "olmo_grain" else {"olmo_eval_index_path": index_path}
    values |= {"eval_interval": 1, "global_batch_size_to_load_eval": _BATCH}
  elif rest:
    values |= {"olmo_packing": rest[0], "olmo_shard": rest[1]}
    # Not split: then rows of single documents are random access under shard=batch.
    values |= {"olmo_long_documents": "truncate"} if rest == ("none", "batch") else {}
  train, evaluation = maxtext_olmo.create_data_iterator(
      _config(index_path, dataset_type, **values), _mesh()
  )
  if evaluation is None:
    return train
  train.close()
  return evaluation


def _from_records(packing, shard="slice"):
  streams = packing == "mixed_stream"
  mixed = packing.startswith("mixed")
  rows = [
      maxtext_olmo.make_grain_llm_dataset(
          jax.process_index(),
          jax.process_count(),
          _records(60 + 30 * number, number),
          _BATCH,
          _LENGTH,
          True,
          7,
          eod_token_id=99,
          packing="best_fit" if streams else None if mixed or packing == "none" else packing,
          shard=shard,
          long_documents="truncate" if packing == "none" else "split" if not mixed else "error",
          grain_packing_bin_count=5,
      )
      for number in range(2 if mixed else 1)
  ]
  return maxtext_olmo.make_grain_multihost_iterator(
      rows,
      None,
      _mesh(),
      _BATCH,
      jax.process_count(),
      [2, 1][: len(rows)],
      worker_count=0,
      batch_class=dict,
  )


def _multihost(kind):
  source = grain.MapDataset.range(jax.process_index(), 900, jax.process_count())
  dataset = source.shuffle(seed=5).map(lambda n: {"inputs": np.full(2, n, np.int32)})
  local = _BATCH // jax.process_count()
  loader = dataset.to_iter_dataset().batch(local)
  if kind == "loader":  # whose state is bytes
    loader = grain.DataLoader(
        data_source=np.arange(100, dtype=np.int32),
        sampler=grain.samplers.IndexSampler(100, shuffle=True, seed=3, num_epochs=2),
        operations=[grain.transforms.Batch(local)],
    )
  return maxtext_olmo.MultiHostDataLoadIterator(loader, _mesh(), iterator_length=20)


def make(kind, index_path):
  """Makes an iterator of a kind."""
  what, *rest = kind.split()
  if what == "records":
    return _from_records(*rest)
  if what == "multihost":
    return _multihost(*rest)
  return _from_config(index_path, what, *rest)


def take(iterator, steps=_STEPS):
  """Takes batches; returns this process's shards of each."""
  found = []
  for _ in range(steps):
    leaves = jax.tree.leaves(next(iterator))
    found.append(
        [[np.asarray(s.data).tolist() for s in leaf.addressable_shards] for leaf in leaves]
    )
  return found


def _save(iterator, directory):
  with ocp.CheckpointManager(directory) as manager:
    manager.save(
        0,
        args=ocp.args.Composite(
            ours=maxtext_olmo.IteratorSave(iterator),
            grain=grain.checkpoint.CheckpointSave(iterator),
            json=ocp.args.JsonSave(iterator.get_state()),
        ),
    )
    manager.wait_until_finished()


def _restore(iterator, directory, item, whose):
  args = {
      "ours": maxtext_olmo.IteratorRestore(iterator),
      "grain": grain.checkpoint.CheckpointRestore(iterator),
      "json": ocp.args.JsonRestore(),
  }[whose]
  with ocp.CheckpointManager(directory) as manager:
    restored = manager.restore(0, args=ocp.args.Composite(**{item: args}))
  if whose == "json":
    iterator.set_state(restored[item])


# The item that is restored, and whose args restore it; "state" passes the state itself.
_WAYS = (("ours", "ours"), ("grain", "grain"), ("grain", "ours"), ("json", "json"), ("state", ""))


def round_trips(kind, index_path, directory):
  """Saves an iterator in mid-stream; returns the ways in which a restored one differs."""
  iterator = make(kind, index_path)
  take(iterator)
  directory = str(pathlib.Path(directory, kind.replace(" ", "_")))
  _save(iterator, directory)
  state = json.loads(json.dumps(iterator.get_state()))
  expected = take(iterator)
  iterator.close()
  wrong = []
  for item, whose in _WAYS:
    other = make(kind, index_path)
    if item == "state":
      other.set_state(_with_numpy_integers(state))
    else:
      _restore(other, directory, item, whose)
    if take(other) != expected or expected[0] == expected[1]:
      wrong.append((item, whose))
    other.close()
  return wrong


def all_round_trips(index_path, directory):
  """Returns the results of the round trips of each kind, and of old states of one process."""
  found = {"old": _restore_old_state(index_path, directory)}
  for kind in KINDS:
    try:
      found[kind] = round_trips(kind, index_path, directory)
    except Exception as error:  # The other kinds are still worth knowing.
      found[kind] = f"{type(error).__name__}: {error}"
  return found


def _restore_old_state(index_path, directory):
  """Restores what process 0 of an earlier release saved of a plain iterator."""
  iterator = make("multihost dataset", index_path)
  state = {"step": 2, "iterator_length": 20, "iterator": iterator.local_iterator.get_state()}
  directory = str(pathlib.Path(directory, "old"))
  with ocp.CheckpointManager(directory) as manager:
    manager.save(0, args=ocp.args.Composite(ours=ocp.args.JsonSave(state)))
    manager.wait_until_finished()
  try:
    _restore(iterator, directory, "ours", "ours")
  except errors.ResumeError as error:
    return str(error)
  finally:
    iterator.close()
  return f"restored at step {iterator.step}"


def restore_elsewhere(index_path, directory, kinds):
  """Restores what another number of processes saved; returns the errors."""
  found = {}
  for kind in kinds:
    iterator = make(kind, index_path)
    saved = str(pathlib.Path(directory, kind.replace(" ", "_")))
    try:
      _restore(iterator, saved, "ours", "ours")
      found[kind] = take(iterator)
    except errors.ResumeError as error:
      found[kind] = str(error)
    iterator.close()
  return found


def _with_numpy_integers(value):
  """Returns a state with NumPy numbers, as some frameworks return it."""
  if isinstance(value, dict):
    return {key: _with_numpy_integers(part) for key, part in value.items()}
  if isinstance(value, list):
    return [_with_numpy_integers(part) for part in value]
  return np.int64(value) if isinstance(value, int) and not isinstance(value, bool) else value


def write_corpus(directory):
  """Writes a small corpus; returns the path of its index."""
  return corpora.write_corpus(directory, tokens_per_file=(900, 700, 7, 1200))[0]
