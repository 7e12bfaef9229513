#!/usr/bin/env python3
"""Reads our Avro records with fastavro: a reader that shares no code with the writer.

Usage: read_batches.py SCHEMA_DIR < framed.bin

Takes on standard input records, each a 4-byte big-endian length and as many bytes of Avro single-object encoding
(0xC3 0x01, the 8-byte little-endian CRC-64-AVRO fingerprint of the writer's schema in Parsing Canonical Form, the
body), and every *.avsc under SCHEMA_DIR. Gives one JSON object a line: {"schema": full name, "value": decoded}; bytes
in hexadecimal, instants as the integers that were written, numbers that JSON lacks as text ("NaN", "Infinity").

It resolves no schema against another: a record must have been written with one of the schemas given.
Exit codes: 0 all read, 2 usage, 4 a record or a schema cannot be read.
"""

import io
import json
import math
import struct
import sys
from pathlib import Path

import fastavro
from fastavro.schema import fingerprint, to_parsing_canonical_form

MARKER = b"\xc3\x01"
HEADER_BYTES = len(MARKER) + 8


class Unreadable(Exception):
    """A sentence about the record or the schema."""


def load_schemas(directory):
    """Maps each fingerprint, as the bytes on the wire, to (full name, schema)."""
    schemas = {}
    for path in sorted(Path(directory).rglob("*.avsc")):
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            # Little-endian, as on the wire: fastavro gives the bytes in that order.
            key = bytes.fromhex(fingerprint(to_parsing_canonical_form(raw), "CRC-64-AVRO"))
            parsed = fastavro.parse_schema(without_logical_types(raw))
        except Exception as error:  # fastavro raises many kinds; each is the same to us
            raise Unreadable(f"{path} is no Avro schema: {error}") from error
        if key not in schemas:
            schemas[key] = (parsed["name"], parsed)
    if not schemas:
        raise Unreadable(f"no *.avsc under {directory}")
    return schemas


def without_logical_types(schema):
    """The same schema on the wire, whose values stay the integers and bytes that were written.

    fastavro would turn timestamps into datetimes, which reach only from year 1 to 9999.
    """
    if isinstance(schema, list):
        return [without_logical_types(branch) for branch in schema]
    if not isinstance(schema, dict):
        return schema
    bare = {key: value for key, value in schema.items() if key != "logicalType"}
    for key in ("type", "items", "values"):
        if key in bare:
            bare[key] = without_logical_types(bare[key])
    if "fields" in bare:
        bare["fields"] = [field | {"type": without_logical_types(field["type"])} for field in bare["fields"]]
    return bare


def frames(stream):
    """Gives the bytes of each record."""
    for index in range(sys.maxsize):
        prefix = stream.read(4)
        if not prefix:
            return
        if len(prefix) < 4:
            raise Unreadable(f"the length of record {index} is cut short")
        (size,) = struct.unpack(">I", prefix)
        record = stream.read(size)
        if len(record) < size:
            raise Unreadable(f"record {index} is cut short: {len(record)} of {size} bytes")
        yield record


def decode(record, schemas):
    """Gives (full name, value) of one record; the whole record must be used."""
    if len(record) < HEADER_BYTES or record[:2] != MARKER:
        raise Unreadable(f"no single-object encoding: it starts with {record[:2].hex() or 'nothing'}")
    key = record[2:HEADER_BYTES]
    if key not in schemas:
        raise Unreadable(f"no schema given has the fingerprint {key[::-1].hex()}")
    name, schema = schemas[key]
    body = io.BytesIO(record[HEADER_BYTES:])
    try:
        value = fastavro.schemaless_reader(body, schema, None)
    except Exception as error:  # as above
        raise Unreadable(f"it does not decode as {name}: {error!r}") from error
    left = len(record) - HEADER_BYTES - body.tell()
    if left:
        raise Unreadable(f"{left} bytes are left after a {name}")
    return name, value


def plain(value):
    """What json can write, without loss."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def main():
    if len(sys.argv) != 2:
        print("usage: read_batches.py SCHEMA_DIR < framed.bin", file=sys.stderr)
        return 2
    try:
        schemas = load_schemas(sys.argv[1])
        for index, record in enumerate(frames(sys.stdin.buffer)):
            try:
                name, value = decode(record, schemas)
            except Unreadable as error:
                raise Unreadable(f"record {index}: {error}") from error
            print(json.dumps({"schema": name, "value": plain(value)}, separators=(",", ":"), allow_nan=False))
    except Unreadable as error:
        sys.stdout.flush()
        print(f"read_batches.py: {error}", file=sys.stderr)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
