"""Reads text from Parquet files; the only module that imports pyarrow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import byte_stream
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError

_ROWS_AT_ONCE = 256


def row_group_bytes(path: str) -> list[int]:
  """Returns the size of each row group, uncompressed."""
  with _open(path) as file:
    metadata = file.metadata
    return [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]


def read_rows(
    path: str, text_field: str, id_field: str, first: int, end: int | None
) -> Iterator[tuple[str, Any]]:
  """Yields the text and the id of each row; a missing text is empty, and a missing id is None.

  Args:
    path: Path of the file.
    text_field: Column of the texts.
    id_field: Column of the ids, which the file need not have.
    first: First row group.
    end: One past the last row group; None for all.
  """
  with _open(path) as file:
    import pyarrow

    names = file.schema_arrow.names
    if text_field not in names:
      raise CorpusError(
          f"{path} has no column {text_field!r}. Its columns: {', '.join(names)} (--text-field)."
      )
    kind = file.schema_arrow.field(text_field).type
    if pyarrow.types.is_dictionary(kind):
      kind = kind.value_type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
      raise CorpusError(f"{path}: the column {text_field!r} contains {kind}, not text.")
    columns = [text_field] + [id_field] * (id_field in names and id_field != text_field)
    groups = range(first, file.metadata.num_row_groups if end is None else end)
    for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=list(groups), columns=columns):
      texts = batch.column(text_field).to_pylist()
      ids = batch.column(id_field).to_pylist() if id_field in columns else [None] * len(texts)
      for text, name in zip(texts, ids):
        yield text or "", name


@contextlib.contextmanager
def _open(path: str) -> Iterator[Any]:
  """Opens a Parquet file; errors of pyarrow in the block become CorpusErrors."""
  try:
    import pyarrow
    from pyarrow import parquet
  except ImportError as error:
    raise ConfigError(
        f"{path} needs the package `pyarrow`: pip install 'maxtext_olmo[parquet]'."
    ) from error
  try:
    source = byte_stream.open_bytes(path) if urls.is_url(path) else path
    with parquet.ParquetFile(source) as file:
      yield file
  except pyarrow.ArrowException as error:
    raise CorpusError(f"Cannot read {path}: {error}.") from error
