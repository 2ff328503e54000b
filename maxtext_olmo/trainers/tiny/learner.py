"""What is learnt and how: the mesh, the optimiser, and the compiled train and eval steps.

The state is `{"step", "params", "opt_state"}`. Large weights, and the optimiser's moments of them,
are split over the mesh axis `fsdp`; all else is on every device. Which rows of a batch lie where is
for the data iterator to say: a step takes the batch as it lies.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
from ml_collections import ConfigDict

from maxtext_olmo import errors
from maxtext_olmo.trainers.tiny import model

State = dict[str, Any]

_FSDP = "fsdp"
# Below this, fetching the pieces of a weight costs more than holding it whole.
_SHARDED_FROM = 1 << 14


def make_mesh(config: ConfigDict) -> Mesh:
  """The mesh of the config over all devices of all processes."""
  axes, shape = tuple(config.mesh_axes), list(config.mesh_shape)
  count = jax.device_count()
  if -1 in shape:
    given = math.prod(size for size in shape if size != -1)
    shape[shape.index(-1)] = count // given
  if math.prod(shape) != count:
    raise errors.ConfigError(
        f"mesh_shape={tuple(config.mesh_shape)} over {axes} does not fit {count} devices"
        f" (processes: {jax.process_count()}); -1 for one axis takes what is left."
    )
  return jax.make_mesh(tuple(shape), axes, axis_types=(AxisType.Auto,) * len(axes))


class Learner:
  """A model and its optimiser on a mesh."""

  def __init__(self, config: ConfigDict, mesh: Mesh):
    self._config = model.ModelConfig.from_config(config)
    self._init_seed = config.init_seed
    self._schedule = _schedule(config)
    self._optimizer = _optimizer(config, self._schedule)
    shapes = jax.eval_shape(self._init)
    shardings = jax.tree_util.tree_map_with_path(functools.partial(_sharding, mesh), shapes)
    self.abstract_state: State = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    self.init = jax.jit(self._init, out_shardings=shardings)
    self.train_step = jax.jit(
        self._train_step, donate_argnums=0, out_shardings=(shardings, everywhere)
    )
    self.eval_step = jax.jit(self._eval_step, out_shardings=everywhere)

  @property
  def parameter_count(self) -> int:
    """How many numbers are learnt."""
    return model.parameter_count(self.abstract_state["params"])

  def _init(self) -> State:
    params = model.init(jax.random.key(self._init_seed), self._config)
    return {
        "step": jnp.zeros((), jnp.int32),
        "params": params,
        "opt_state": self._optimizer.init(params),
    }

  def _train_step(self, state: State, batch: model.Batch) -> tuple[State, dict[str, jax.Array]]:
    def mean_loss(params: model.Params) -> tuple[jax.Array, jax.Array]:
      total, count = model.loss_sum(params, batch, self._config)
      return total / jnp.maximum(count, 1), count

    (loss, count), grads = jax.value_and_grad(mean_loss, has_aux=True)(state["params"])
    updates, opt_state = self._optimizer.update(grads, state["opt_state"], state["params"])
    metrics = {
        "loss": loss,
        "grad_norm": optax.tree.norm(grads),
        "learning_rate": self._schedule(state["step"]),
        "target_tokens": count,
    }
    params = optax.apply_updates(state["params"], updates)
    return {"step": state["step"] + 1, "params": params, "opt_state": opt_state}, metrics

  def _eval_step(self, params: model.Params, batch: model.Batch) -> tuple[jax.Array, jax.Array]:
    return model.loss_sum(params, batch, self._config)


def _schedule(config: ConfigDict) -> optax.Schedule:
  return optax.warmup_cosine_decay_schedule(
      init_value=0.0,
      peak_value=config.learning_rate,
      warmup_steps=config.warmup_steps,
      decay_steps=max(config.steps, config.warmup_steps + 1),
      end_value=config.learning_rate * config.learning_rate_final_fraction,
  )


def _optimizer(config: ConfigDict, schedule: optax.Schedule) -> optax.GradientTransformation:
  clip = optax.clip_by_global_norm(config.grad_clip) if config.grad_clip else optax.identity()
  adamw = optax.adamw(
      schedule,
      b1=config.adam_b1,
      b2=config.adam_b2,
      eps=config.adam_eps,
      weight_decay=config.weight_decay,
      mask=functools.partial(jax.tree_util.tree_map_with_path, _is_decayed),
  )
  return optax.chain(clip, adamw)


def _is_decayed(path: tuple[Any, ...], leaf: Any) -> bool:
  del leaf
  name = path[-1].key
  return name != "embedding" and not name.endswith("norm")


def _sharding(mesh: Mesh, path: tuple[Any, ...], leaf: Any) -> NamedSharding:
  spec: list[str | None] = [None] * leaf.ndim
  if _FSDP in mesh.axis_names and leaf.size >= _SHARDED_FROM:
    # The axis of layers is walked by a scan, which wants it whole on every device.
    first = 1 if any(getattr(key, "key", None) == "layers" for key in path) else 0
    axes = [a for a in range(first, leaf.ndim) if leaf.shape[a] % mesh.shape[_FSDP] == 0]
    if axes:
      spec[max(axes, key=lambda axis: leaf.shape[axis])] = _FSDP
  return NamedSharding(mesh, PartitionSpec(*spec))


def to_numbers(metrics: dict[str, jax.Array]) -> dict[str, float]:
  """Metrics as Python numbers; waits for the step that makes them."""
  return {name: np.asarray(value).item() for name, value in metrics.items()}
