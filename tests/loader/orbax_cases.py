"""Functions that the processes of the Orbax tests run."""

import grain
import jax
import ml_collections
import numpy as np
import orbax.checkpoint as ocp

import maxtext_olmo

# How the iterator is saved, by the name of the item.
_SAVES = {
    "ours": lambda it: maxtext_olmo.IteratorSave(it),
    "grain": lambda it: grain.checkpoint.CheckpointSave(it),
    "json": lambda it: ocp.args.JsonSave(it.get_state()),
}


def go_on(config, directory, restore=None, steps=2):
  """Restores an iterator and a model, takes some steps and saves both; returns the ids of the steps
  and the model.

  Args:
    restore: (label, item, args): the checkpoint, its item, and whose args restore it; None begins.
  """
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
  iterator, _ = maxtext_olmo.create_data_iterator(ml_collections.ConfigDict(config), mesh)
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  model = jax.make_array_from_callback((4,), sharding, lambda _: np.zeros(4, np.float32))
  if restore is not None:
    with ocp.CheckpointManager(directory) as manager:
      label, item, whose = restore
      if whose == "json":
        state_args = ocp.args.JsonRestore()
      else:
        state_args = {
            "ours": maxtext_olmo.IteratorRestore,
            "grain": grain.checkpoint.CheckpointRestore,
        }[whose](iterator)
      abstract = jax.ShapeDtypeStruct(model.shape, model.dtype, sharding=sharding)
      restored = manager.restore(
          label,
          args=ocp.args.Composite(
              model=ocp.args.StandardRestore({"w": abstract}), **{item: state_args}
          ),
      )
      if whose == "json":
        iterator.set_state(restored[item])
      model = restored["model"]["w"]
  taken = []
  for _ in range(steps):
    taken.append(iterator.row_numbers(iterator.step).tolist())
    next(iterator)
  label = iterator.step - 1
  # A manager of its own: Orbax ties each item of a manager to the first handler that it meets.
  with ocp.CheckpointManager(directory) as manager:
    manager.save(
        label,
        args=ocp.args.Composite(
            model=ocp.args.StandardSave({"w": model + steps}),
            **{item: save(iterator) for item, save in _SAVES.items()},
        ),
    )
    manager.wait_until_finished()
  iterator.close()
  return taken, float(np.asarray(model.addressable_shards[0].data)[0]), label
