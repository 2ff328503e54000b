"""Turns requests of lm-evaluation-harness into global batches, for your own evaluation loop.

Each request becomes one row. The rows are sorted by length, padded to a few different lengths, and
distributed over the hosts. `JaxLM` does the same for the harness itself, but packs several requests
into a row. Both use the plans of `packing`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import grain
import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from maxtext_olmo import errors
from maxtext_olmo import grain_compat
from maxtext_olmo.devices import layout as layout_lib
from maxtext_olmo.devices import multihost
from maxtext_olmo.evaluation import packing
from maxtext_olmo.evaluation import requests as requests_lib
from maxtext_olmo.evaluation import tokenizer as tokenizer_lib
from maxtext_olmo.rows import batch
from maxtext_olmo.rows import workers

LOGGER = logging.get_absl_logger()


def lmeval_preprocessing_pipeline(
    dataloading_host_index: int,
    dataloading_host_count: int,
    global_mesh: Mesh,
    dataset: Sequence[Any],
    global_batch_size: int,
    tokenizer_path: str,
    hf_access_token: str | None = None,
    tokenizer_cache_dir: str | None = None,
    eos_token_id: int | None = None,
    bos_token_id: int | None = None,
    worker_count: int = 1,
    worker_buffer_size: int = 1,
    padding_multiple: int = 128,
    use_thread_prefetch: bool = False,
) -> multihost.MultiHostDataLoadIterator:
  """Returns an iterator over batches of `loglikelihood` and `loglikelihood_rolling` requests.

  Every host passes the same requests and gets its rows of each global batch, as an
  `LLMIndexedBatch`. `document_idx` counts the requests from 1; 0 marks a padding row.
  `targets_segmentation` is 1 for each token to score. A request with nothing to score has no row.
  Rows can have any length. For models with a length limit, use `HFTokenizeLogLikelihoodRolling` or
  `JaxLM`.

  Args:
    dataloading_host_index: Index of this host, such as `jax.process_index()`.
    dataloading_host_count: Number of hosts that load data, such as `jax.process_count()`.
    global_mesh: The mesh to shard the batches over.
    dataset: The requests; anything with a length and `__getitem__`.
    global_batch_size: Rows per batch, over all hosts.
    tokenizer_path: `bytes`, a tokenizer.json, a directory with one, or `hf:NAME` on the Hub.
    hf_access_token: Access token for a private tokenizer on the Hub.
    tokenizer_cache_dir: Directory that caches tokenizers from the Hub.
    eos_token_id: Token that ends a text, instead of the tokenizer's EOS.
    bos_token_id: Token that precedes a text without context, instead of the tokenizer's BOS or EOS.
    worker_count: Worker processes that make batches; 0 for none.
    worker_buffer_size: Batches that each worker prepares in advance.
    padding_multiple: All lengths are rounded up to a multiple of this.
    use_thread_prefetch: Whether a thread prepares batches, instead of worker processes.

  Example:
    >>> import types
    >>> mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    >>> request = types.SimpleNamespace(args=("The sky is", " blue"))
    >>> batches = lmeval_preprocessing_pipeline(
    ...     0, 1, mesh, [request], 2, "bytes", worker_count=0, padding_multiple=16)
    >>> batch = next(iter(batches))
    >>> batch.document_idx.tolist()  # One request, and a padding row.
    [1, 0]
    >>> targets, scored = np.asarray(batch.targets[0]), np.asarray(batch.targets_segmentation[0])
    >>> bytes(targets[scored != 0].tolist())
    b' blue'
  """
  tokenizer = tokenizer_lib.load_eval_tokenizer(
      tokenizer_path,
      hf_access_token=hf_access_token,
      tokenizer_cache_dir=tokenizer_cache_dir,
      eos_token_id=eos_token_id,
      bos_token_id=bos_token_id,
  )
  arguments = [_arguments(dataset[i], i) for i in range(len(dataset))]
  rows = requests_lib.request_rows(tokenizer, arguments)
  batches = local_batches(
      rows,
      global_batch_size,
      host=dataloading_host_index,
      host_count=dataloading_host_count,
      padding_multiple=padding_multiple,
  )
  LOGGER.info("%d requests make %d batches of %d", len(arguments), len(batches), global_batch_size)
  ready: Any = batches
  if len(batches):
    ready = batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))
    if use_thread_prefetch:
      ready = grain_compat.ThreadPrefetchIterDataset(
          ready, prefetch_buffer_size=max(1, worker_buffer_size * worker_count)
      )
    elif worker_count > 0:
      ready = workers.in_workers(ready, workers=worker_count, ahead=worker_buffer_size)
  return multihost.MultiHostDataLoadIterator(
      ready,
      global_mesh,
      iterator_length=len(batches),
      dataset_size=len(arguments),
      reset_after_epoch=True,
  )


def _arguments(request: Any, number: int) -> Any:
  """Returns the arguments of a request."""
  if not hasattr(request, "args"):
    raise errors.ConfigError(
        f"Request {number} is a {type(request).__name__}: expected a request of the harness"
        " (lm_eval.api.instance.Instance), or any object with `args`, a tuple of one text or of a"
        " context and its continuation."
    )
  return request.args


def local_batches(
    rows: Sequence[requests_lib.Row],
    global_batch_size: int,
    *,
    host: int,
    host_count: int,
    padding_multiple: int,
) -> grain.MapDataset[batch.LLMIndexedBatch]:
  """Returns this host's rows of each global batch, one request per row, the longest batch first."""
  if not 0 <= host < host_count or global_batch_size < 1 or padding_multiple < 1:
    raise errors.ConfigError(
        f"Host {host} of {host_count}, global_batch_size={global_batch_size} and"
        f" padding_multiple={padding_multiple}: the host must be from 0 to the number of hosts - 1,"
        " and all other values must be positive."
    )
  if global_batch_size % host_count:
    raise errors.ConfigError(
        f"A global batch of {global_batch_size} rows does not divide over {host_count} hosts;"
        f" choose a multiple of {host_count}."
    )
  local_rows = global_batch_size // host_count
  lengths = [row.length for row in rows]
  steps = packing.plan_steps(lengths, global_batch_size, padding_multiple, pack=False)

  def make(step: packing.Step) -> batch.LLMIndexedBatch:
    made = packing.step_batch(step, rows, host * local_rows, local_rows)
    # A row is a single document, so there is no border inside it.
    return dataclasses.replace(made, _document_borders=np.zeros_like(made._document_borders))

  return grain.MapDataset.source(steps).map(make)


def host_share(mesh: Mesh, data_sharding: PartitionSpec | None) -> tuple[int, int]:
  """Returns the index of this process's share of each batch, and the number of shares.

  The mesh decides: processes whose devices hold the same rows load the same share.
  """
  spec = layout_lib.partition_spec(mesh, data_sharding)
  rows = PartitionSpec(spec[0] if len(spec) else None)
  held: dict[int, set[int]] = {}
  places: Any = NamedSharding(mesh, rows).devices_indices_map((mesh.size,))
  for device, (place,) in places.items():
    held.setdefault(device.process_index, set()).add(place.start or 0)
  shares = sorted({tuple(sorted(shards)) for shards in held.values()})
  if sum(len(share) for share in shares) != len({shard for share in shares for shard in share}):
    raise errors.ConfigError(
        f"With data_sharding {data_sharding} on the mesh {dict(mesh.shape)}, the rows of some"
        " processes overlap only in part. Arrange the mesh so that any two processes hold either"
        " the same rows or no common rows."
    )
  return shares.index(tuple(sorted(held[jax.process_index()]))), len(shares)
