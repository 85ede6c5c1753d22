"""Read a JSON file that is one list of objects, as Alpaca's is. It is one unit, and in memory while it is read."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path

from zaya_jax.data.readers import documents
from zaya_jax.data.readers.fields import LONGEST
from zaya_jax.data.readers.jsonl import read_object
from zaya_jax.errors import InputError


def read_array(unit: documents.Unit, field: str) -> Iterator[documents.Entry]:
    """Yield the field of each object; `InputError` if the file is no list, or too large to be read at once."""
    [file] = unit.files
    with documents.reading(f"The file {file}"):
        size = Path(file).stat().st_size
        content = Path(file).read_bytes() if size <= LONGEST else b""
    if size > LONGEST:
        lines = Path(file).with_suffix(".jsonl")
        advice = f"Convert it, for example with: jq -c '.[]' {file} > {lines}"
        raise InputError(f"The file {file} is one JSON list of more than {LONGEST:,} bytes. {advice}")
    try:
        records = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"The file {file} is not valid JSON: {error}.") from error
    first = documents.FirstLine()
    for index, record in enumerate(records):
        share = documents.even_share(unit.bytes, len(records), index, index + 1)
        yield read_object(record, field).entry(file, share, index, first)


FORMAT = documents.Format(functools.partial(documents.cut_evenly, lambda path: 1), read_array)
