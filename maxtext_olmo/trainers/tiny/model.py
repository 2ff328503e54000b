"""A decoder-only language model in plain JAX: parameters are a dict, the model is a function.

The model has RMSNorm before each block, rotary positions and SwiGLU. Attention stays within a
document: token q attends to token k if k is not after q and both have the same segment id. For a
row with the documents A and B and one token of padding:

    segment   1 1 1 2 2 0         sees   A  A  A  B  B  .
    position  0 1 2 0 1 0          A0    x
                                   A1    x  x
                                   A2    x  x  x
                                   B0             x
                                   B1             x  x
                                   .                    x

`Learner` has the mesh, the optimiser, and the compiled train and eval steps. The state is `{"step",
"params", "opt_state"}`. Large weights and their optimiser moments are sharded over the mesh axis
`fsdp`; everything else is replicated. The data iterator decides which device holds which rows of a
batch: a step takes the batch as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
from ml_collections import ConfigDict

from maxtext_olmo import errors

Params = dict[str, Any]
Batch = dict[str, jax.Array]

_NORM_EPSILON = 1e-6
_INIT_STDDEV = 0.02


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The shape of a model."""

  vocab_size: int
  emb_dim: int
  num_layers: int
  num_heads: int
  head_dim: int
  mlp_dim: int
  logits_via_embedding: bool = True
  rope_max_timescale: int = 10_000
  dtype: str = "float32"
  remat: bool = False

  @classmethod
  def from_config(cls, config: ConfigDict) -> ModelConfig:
    """Reads each field from the config key of the same name."""
    return cls(**{field.name: config[field.name] for field in dataclasses.fields(cls)})


def init(rng: jax.Array, config: ModelConfig) -> Params:
  """Returns the initial parameters in float32, with all layers stacked along a leading axis."""
  layers, emb = config.num_layers, config.emb_dim
  heads = config.num_heads * config.head_dim
  # Each layer adds two projections to the residual stream, so more layers need smaller weights.
  out_stddev = _INIT_STDDEV / math.sqrt(2 * layers)
  shapes = {
      "query": ((layers, emb, heads), _INIT_STDDEV),
      "key": ((layers, emb, heads), _INIT_STDDEV),
      "value": ((layers, emb, heads), _INIT_STDDEV),
      "attention_out": ((layers, heads, emb), out_stddev),
      "gate": ((layers, emb, config.mlp_dim), _INIT_STDDEV),
      "up": ((layers, emb, config.mlp_dim), _INIT_STDDEV),
      "down": ((layers, config.mlp_dim, emb), out_stddev),
  }
  keys = jax.random.split(rng, len(shapes) + 2)
  params: Params = {
      "embedding": _normal(keys[0], (config.vocab_size, emb), _INIT_STDDEV),
      "layers": {
          name: _normal(key, shape, stddev)
          for key, (name, (shape, stddev)) in zip(keys[2:], shapes.items())
      },
      "final_norm": jnp.ones(emb),
  }
  for norm in ("attention_norm", "mlp_norm"):
    params["layers"][norm] = jnp.ones((layers, emb))
  if not config.logits_via_embedding:
    params["output"] = _normal(keys[1], (emb, config.vocab_size), _INIT_STDDEV)
  return params


def apply(params: Params, batch: Batch, config: ModelConfig) -> jax.Array:
  """Returns the logits (rows, tokens, vocabulary) of a batch, in float32."""
  dtype = jnp.dtype(config.dtype)
  x = params["embedding"].astype(dtype)[batch["inputs"]]
  mask = _attention_mask(batch["inputs_segmentation"])
  sin, cos = _rope_angles(batch["inputs_position"], config)
  layer: Any = functools.partial(_layer, mask=mask, sin=sin, cos=cos, config=config)
  if config.remat:
    layer = jax.checkpoint(layer)
  x, _ = jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, params["layers"])
  x = _rms_norm(x, params["final_norm"])
  output = params["embedding"].T if config.logits_via_embedding else params["output"]
  return jnp.matmul(x, output.astype(dtype), preferred_element_type=jnp.float32)


def loss_sum(params: Params, batch: Batch, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
  """Returns the total cross-entropy of the tokens that count in the loss, and how many count."""
  logits = apply(params, batch, config)
  target = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
  counts = batch["targets_segmentation"] != 0
  losses = jnp.where(counts, jax.nn.logsumexp(logits, axis=-1) - target, 0.0)
  return losses.sum(), counts.sum()


def _normal(key: jax.Array, shape: tuple[int, ...], stddev: float) -> jax.Array:
  return stddev * jax.random.truncated_normal(key, -3.0, 3.0, shape)


def _layer(
    x: jax.Array,
    weights: Params,
    *,
    mask: jax.Array,
    sin: jax.Array,
    cos: jax.Array,
    config: ModelConfig,
) -> jax.Array:
  w = {name: value.astype(x.dtype) for name, value in weights.items()}
  h = _rms_norm(x, weights["attention_norm"])
  heads = (*x.shape[:2], config.num_heads, config.head_dim)
  query, key, value = ((h @ w[name]).reshape(heads) for name in ("query", "key", "value"))
  query, key = _rotate(query, sin, cos), _rotate(key, sin, cos)
  attended = jax.nn.dot_product_attention(query, key, value, mask=mask)
  x = x + attended.reshape(*x.shape[:2], -1) @ w["attention_out"]
  h = _rms_norm(x, weights["mlp_norm"])
  return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def _attention_mask(segments: jax.Array) -> jax.Array:
  """Returns the mask (rows, 1, queries, keys); padding attends to padding to avoid empty rows."""
  same = segments[:, None, :, None] == segments[:, None, None, :]
  length = segments.shape[1]
  return same & jnp.tril(jnp.ones((length, length), bool))


def _rope_angles(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
  half = config.head_dim // 2
  timescale = float(config.rope_max_timescale) ** (jnp.arange(half) / half)
  angles = positions[:, :, None, None] / timescale
  return jnp.sin(angles), jnp.cos(angles)


def _rotate(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return turned.astype(x.dtype)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
  x32 = x.astype(jnp.float32)
  norm = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + _NORM_EPSILON)
  return (x32 * norm * scale).astype(x.dtype)


State = dict[str, Any]

_FSDP = "fsdp"
# Below this size, gathering the shards of a weight costs more than replicating it.
_SHARDED_FROM = 1 << 14


def make_mesh(config: ConfigDict) -> Mesh:
  """Returns the mesh of the config, over all devices of all processes."""
  sizes = mesh_sizes(config, jax.device_count())
  types = (AxisType.Auto,) * len(sizes)
  return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def mesh_sizes(config: ConfigDict, devices: int) -> dict[str, int]:
  """Returns the size of each axis of the config's mesh over a number of devices."""
  axes, shape = tuple(config.mesh_axes), list(config.mesh_shape)
  if -1 in shape:
    given = math.prod(size for size in shape if size != -1)
    shape[shape.index(-1)] = devices // given
  if math.prod(shape) != devices:
    needed = math.prod(size for size in config.mesh_shape if size != -1)
    multiple = "a multiple of " if -1 in config.mesh_shape else ""
    fitting = (-1, *(1 for _ in axes[1:]))
    raise errors.ConfigError(
        f"mesh_shape={tuple(config.mesh_shape)} over {axes} needs {multiple}{needed} devices, found"
        f" {devices} (processes: {jax.process_count()}). mesh_shape={fitting} fits any number."
    )
  return dict(zip(axes, shape))


class Learner:
  """A model and its optimiser on a mesh."""

  def __init__(self, config: ConfigDict, mesh: Mesh):
    self._config = ModelConfig.from_config(config)
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
    """The number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(self.abstract_state["params"]))

  def _init(self) -> State:
    params = init(jax.random.key(self._init_seed), self._config)
    return {
        "step": jnp.zeros((), jnp.int32),
        "params": params,
        "opt_state": self._optimizer.init(params),
    }

  def _train_step(self, state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
    def mean_loss(params: Params) -> tuple[jax.Array, jax.Array]:
      total, count = loss_sum(params, batch, self._config)
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

  def _eval_step(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    return loss_sum(params, batch, self._config)


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
    # `scan` iterates over the layer axis, so that axis must not be sharded.
    first = 1 if any(getattr(key, "key", None) == "layers" for key in path) else 0
    axes = [a for a in range(first, leaf.ndim) if leaf.shape[a] % mesh.shape[_FSDP] == 0]
    if axes:
      spec[max(axes, key=lambda axis: leaf.shape[axis])] = _FSDP
  return NamedSharding(mesh, PartitionSpec(*spec))
