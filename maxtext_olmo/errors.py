"""The exceptions of this library, by kind.

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
  """A token file, a manifest or an index is damaged, inconsistent or unreadable."""


class MissingFileError(CorpusError, FileNotFoundError):
  """A file or directory of the corpus does not exist."""


class WriteError(MaxtextOlmoError, OSError):
  """A file cannot be written: no space, no permission, or its path is not a regular file."""


class WorkerError(MaxtextOlmoError, RuntimeError):
  """A worker process that prepares batches has died."""


class OrderError(MaxtextOlmoError, IndexError):
  """A position, place or instance lies outside the stream."""


class ConfigError(MaxtextOlmoError, ValueError):
  """The configuration is invalid; nothing has been read yet."""


class ResumeError(MaxtextOlmoError, ValueError):
  """A checkpoint or state does not belong to this stream."""
