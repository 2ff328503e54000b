"""Work over a whole corpus, done piece by piece on one machine or on many.

    work      a picklable function of an item, with a name, a version and settings (`run.Work`)
    item      a piece of a token file (`pieces.Piece`), or another unit such as an input file
    result    JSON values and arrays, one small file per item (`results`)
    engine    what calls the function: threads, processes, Dask or Ray (`engines`)

The result files are the only state of the work. Any later run, on any engine and with any number of
workers, processes only the items that have no result yet. If a worker, a driver or a machine is
killed, only the items it was working on are lost.
"""
