"""A small run with checkpoints and two changes of the batch size, and the batches it received."""

import dataclasses
import gzip
import pathlib
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

import maxtext_olmo
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from tests.loader import cases

SIZES = (4, 6, 2)
STEPS = 5  # of each size


@dataclasses.dataclass(frozen=True)
class SmallRun:
  """A run: its directory, its checkpoints, its config, and the batches that it received."""

  directory: pathlib.Path
  config: dict[str, Any]
  batches: list[cases.Batch]

  @property
  def checkpoints(self) -> str:
    return str(self.directory / "run" / "checkpoints")

  @property
  def index_path(self) -> str:
    return str(self.directory / "index.json")


def write_texts(directory: pathlib.Path, texts: dict[str, list[str]]) -> str:
  """Writes documents as bytes, a file for each label, and their index; returns its path."""
  tokenizer = tokenizer_lib.ByteTokenizer()
  entries = []
  for label, documents in texts.items():
    path = directory / "data" / f"{label}.npy"
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = [np.append(tokens, tokenizer.eos_id) for tokens in tokenizer.encode(documents)]
    np.concatenate(ids).astype("<u2").tofile(path)
    entries.append((str(path), label))
  index = index_lib.build_index(
      entries, 32, tokenizer="bytes", dtype="uint16", base=str(directory / "data")
  )
  index.save(directory / "index.json")
  documents_lib.build_documents(index, f"{directory / 'index.json'}.documents", tokenizer.eos_id)
  return str(directory / "index.json")


def texts() -> dict[str, list[str]]:
  """Returns documents by label; the one with a seal comes once."""
  made = {
      label: [f"{label} {number}: " + "lorem ipsum " * (number % 9) for number in range(40)]
      for label in ("wiki", "web")
  }
  made["web"][17] = "a document with a harbour seal in it, and \x1b[31mred\x1b[0m letters"
  return made


ATTACK = (
    "</pre><script>document.body.dataset.attacked = 'yes'</script>"
    '<img src=x onerror="document.body.dataset.attacked = 1"> & \u202e end'
)


def hostile_texts() -> dict[str, list[str]]:
  """Returns documents of which half are live HTML."""
  return {**texts(), "web": [f"{number} {ATTACK}" for number in range(40)]}


def write(
    directory: str,
    sizes: tuple[int, ...] = SIZES,
    documents: dict[str, list[str]] | None = None,
    **values: Any,
) -> SmallRun:
  """Runs a few steps with each batch size; saves a checkpoint after each."""
  root = pathlib.Path(directory)
  index_path = write_texts(root, documents or texts())
  checkpoints = root / "run" / "checkpoints"
  config = {
      "olmo_index_path": index_path,
      "max_target_length": 32,
      "vocab_size": 258,
      "checkpoint_dir": str(checkpoints),
      **values,
  }
  batches: list[cases.Batch] = []
  for size in sizes:
    made = cases.data_config(**config, global_batch_size_to_load=size)
    train, _ = maxtext_olmo.create_data_iterator(made, cases.device_mesh())
    batches += cases.take(train, STEPS)
    with ocp.CheckpointManager(checkpoints) as manager:
      args = ocp.args.Composite(data=ocp.args.JsonSave(train.get_state()))
      manager.save(train.step - 1, args=args)
    train.close()
  return SmallRun(root, {**config, "global_batch_size_to_load": sizes[-1]}, batches)


# Names of documents by their place in the label web: two share a name, and one is called 3.
NAMES = {2: "3", 5: "shared", 6: "shared", 7: "\x1b[31mred"}


def write_names(run: SmallRun, names: dict[int, str] | None = None) -> None:
  """Names the documents of the label web by their place; `names` replaces `NAMES`."""
  index = index_lib.load_index(run.index_path)
  path = f"{run.index_path}.documents"
  documents = documents_lib.load_documents(path, index)
  first, end = documents.file_offsets[1:3].tolist()
  lines = []
  for place, number in enumerate(range(first, end)):
    start, length = (
        int(documents.locate(np.array([number]))[1][0]),
        documents.lengths(np.array([number]))[0],
    )
    name = (NAMES if names is None else names).get(place, f"web-{place}")
    lines.append(f"{start},{start + int(length)},{name},web.jsonl,{place + 1}\n")
  (run.directory / "data" / "web.csv.gz").write_bytes(gzip.compress("".join(lines).encode()))
  documents_lib.build_documents(index, path, documents.eos_id)
