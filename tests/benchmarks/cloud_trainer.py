"""A trainer that takes batches from an object store at a given pace; measured by `cloud.py`."""

import json
import os
import resource
import sys
import time
from typing import Any


def main(job: dict[str, Any]) -> None:
  """Takes steps at their time, and prints how long it waited for batches."""
  import jax

  jax.config.update("jax_num_cpu_devices", 1)
  import maxtext_olmo
  from tests.loader import cases

  config = cases.data_config(
      olmo_index_path=job["index"],
      olmo_storage_endpoint=job["endpoint"],
      olmo_storage_anonymous=True,
      max_target_length=job["length"],
      global_batch_size_to_load=job["batch"],
      vocab_size=100_278,
      olmo_instance_filter=False,
  )
  iterator, _ = maxtext_olmo.create_data_iterator(config, cases.device_mesh())
  step_seconds = job["batch"] * job["length"] / job["tokens_per_second"]
  for _ in range(8):  # Compiles what puts batches on the device.
    jax.block_until_ready(next(iterator))
    time.sleep(step_seconds)
  waited, began = 0.0, time.monotonic()
  used = resource.getrusage(resource.RUSAGE_SELF)
  for _ in range(job["steps"]):
    asked = time.monotonic()
    batch = next(iterator)
    waited += time.monotonic() - asked
    del batch
    # The step itself: an accelerator would be busy.
    time.sleep(step_seconds)
  seconds = time.monotonic() - began
  now = resource.getrusage(resource.RUSAGE_SELF)
  cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
  print(json.dumps({"waited": waited, "seconds": seconds, "cpu": cpu}), flush=True)
  iterator.close()
  os._exit(0)


if __name__ == "__main__":
  main(json.loads(sys.argv[1]))
