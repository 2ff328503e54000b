"""The exceptions of this library.

Each message says what happened, where, what was expected and found, and what to do. Each exception
takes one argument, its message, so that it survives pickling on its way out of a worker process.
"""


class MaxtextOlmoError(Exception):
  """The base class of every exception that this library raises on purpose.

  >>> try:
  ...   raise ConfigError("olmo_seed must not be negative, got -1.")
  ... except MaxtextOlmoError as error:
  ...   print(error)
  olmo_seed must not be negative, got -1.
  """


class CorpusError(MaxtextOlmoError, ValueError):
  """A token file, a manifest or an index is damaged, inconsistent or unreadable.

  >>> import tempfile
  >>> import maxtext_olmo
  >>> with tempfile.NamedTemporaryFile(suffix=".json") as file:
  ...   maxtext_olmo.load_index(file.name)
  Traceback (most recent call last):
    ...
  maxtext_olmo.errors.CorpusError: The index ... is not valid JSON: ...
  """


class MissingFileError(CorpusError, FileNotFoundError):
  """A file or directory of the corpus does not exist.

  >>> import maxtext_olmo
  >>> maxtext_olmo.load_index("/no/such/index.json")
  Traceback (most recent call last):
    ...
  maxtext_olmo.errors.MissingFileError: Cannot read the index /no/such/index.json: ...
  """


class StoreUnavailableError(CorpusError):
  """An object store did not answer for so long that the request was given up.

  Nothing is wrong with the corpus, so the same command may succeed later (`is_transient`).

  >>> issubclass(StoreUnavailableError, CorpusError)
  True
  """


class WriteError(MaxtextOlmoError, OSError):
  """A file cannot be written: no space, no permission, or its path is not a regular file.

  >>> import tempfile
  >>> import maxtext_olmo
  >>> index = maxtext_olmo.OlmoNpyIndex("2", 4, "uint32", "none", (), 0, 0)
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   index.save(folder)
  Traceback (most recent call last):
    ...
  maxtext_olmo.errors.WriteError: Cannot write ...: it exists and is not a regular file. ...
  """


class WorkerError(MaxtextOlmoError, RuntimeError):
  """A worker process that prepares batches has died.

  It is also a RuntimeError. After it is raised, `next()` starts the workers again.

  >>> issubclass(WorkerError, RuntimeError)
  True
  """


class OrderError(MaxtextOlmoError, IndexError):
  """A position, place or instance lies outside the stream.

  >>> import maxtext_olmo
  >>> maxtext_olmo.BatchSchedule.constant(8).start(-1)
  Traceback (most recent call last):
    ...
  maxtext_olmo.errors.OrderError: Steps count from 0, got -1.
  """


class ConfigError(MaxtextOlmoError, ValueError):
  """The configuration is invalid; nothing has been read yet.

  >>> import maxtext_olmo
  >>> maxtext_olmo.make_order("random", num_instances=10, seed=0)
  Traceback (most recent call last):
    ...
  maxtext_olmo.errors.ConfigError: olmo_order='random' is not a known order; choose from ...
  """


class ResumeError(MaxtextOlmoError, ValueError):
  """A checkpoint or state does not belong to this stream.

  >>> import jax
  >>> import numpy as np
  >>> import maxtext_olmo
  >>> config = maxtext_olmo.get_config()
  >>> config.dataset_type = "synthetic"
  >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
  >>> train, _ = maxtext_olmo.create_data_iterator(config, mesh)
  >>> train.set_state({"step": 5})
  Traceback (most recent call last):
    ...
  maxtext_olmo.errors.ResumeError: This is not a data state that this library saved: ...
  >>> train.close()
  """


def is_transient(error: BaseException) -> bool:
  """Returns whether a restart may succeed although nobody changes anything.

  >>> is_transient(WorkerError("Worker 3 was killed.")), is_transient(ConfigError("Bad key."))
  (True, False)
  """
  cause: BaseException | None = error
  while cause is not None:
    if isinstance(cause, WorkerError | StoreUnavailableError):
      return True
    cause = cause.__cause__
  return False


def describe(error: BaseException) -> str:
  """Returns the type and message of an error for other processes, which pass it to `from_peer`.

  If the error has a transient cause, the type is that of the cause.
  """
  kind: BaseException = error
  while is_transient(kind) and kind.__cause__ is not None and is_transient(kind.__cause__):
    kind = kind.__cause__
  return f"{type(kind).__name__}: {error}"


def from_peer(
    text: str, message: str, kind: type[MaxtextOlmoError] = MaxtextOlmoError
) -> MaxtextOlmoError:
  """Returns the error for a process that stops because another one failed.

  If a restart may succeed, both errors have the same type, so that all processes exit with the same
  code.

  Args:
    text: The other error, as `describe` returns it.
    message: Message of the returned error.
    kind: Type of the returned error if a restart cannot succeed.
  """
  transient = {one.__name__: one for one in (WorkerError, StoreUnavailableError)}
  return transient.get(text.partition(":")[0], kind)(message)
