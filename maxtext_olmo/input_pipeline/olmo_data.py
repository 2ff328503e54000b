"""The names of `maxtext.input_pipeline.olmo_data`: the index and the repetition filter."""

from maxtext_olmo.corpus.index import INDEX_FORMAT_VERSION
from maxtext_olmo.corpus.index import OlmoNpyFileEntry
from maxtext_olmo.corpus.index import OlmoNpyIndex
from maxtext_olmo.corpus.index import compute_fingerprint
from maxtext_olmo.corpus.index import global_to_local
from maxtext_olmo.corpus.index_builder import build_index
from maxtext_olmo.corpus.index_builder import load_index
from maxtext_olmo.corpus.npy_header import has_npy_magic
from maxtext_olmo.corpus.npy_header import parse_npy_header
from maxtext_olmo.corpus.npy_header import read_npy_header_from_path
from maxtext_olmo.corpus.npy_header import read_raw_metadata_from_path
from maxtext_olmo.rows.repetition import RepetitionTuple
from maxtext_olmo.rows.repetition import find_periodic_sequences
from maxtext_olmo.rows.repetition import is_clean_instance

__all__ = [
    "INDEX_FORMAT_VERSION",
    "OlmoNpyFileEntry",
    "OlmoNpyIndex",
    "RepetitionTuple",
    "build_index",
    "compute_fingerprint",
    "find_periodic_sequences",
    "global_to_local",
    "has_npy_magic",
    "is_clean_instance",
    "load_index",
    "parse_npy_header",
    "read_npy_header_from_path",
    "read_raw_metadata_from_path",
]
