"""Random rows of parts for property tests, as a list of tuples per row."""

from hypothesis import strategies as st

# The parts of a row: (source, first, count) each.
Row = list[tuple[int, int, int]]


def rows(
    *,
    max_rows: int = 6,
    max_parts: int = 5,
    num_sources: int = 3,
    max_first: int = 50,
    max_count: int = 9,
) -> st.SearchStrategy[list[Row]]:
  """Generates rows of up to `max_parts` parts each; some have none."""
  part = st.tuples(
      st.integers(0, num_sources - 1), st.integers(0, max_first), st.integers(1, max_count)
  )
  return st.lists(st.lists(part, max_size=max_parts), max_size=max_rows)
