#!/usr/bin/env python3
"""Counts the rows of a local Delta table with DuckDB: a reader that shares no code with the writer.

Usage: count_rows.py TABLE_DIR [SQL-FILTER]

Replays the table's log by itself (github.com/delta-io/delta/blob/master/PROTOCOL.md): the checkpoint that
_last_checkpoint names, if any, then each later commit in order. Gives {"files": n, "rows": n} on standard output:
the active files, and the rows in them for which the filter holds, which may name the partition columns.

It knows no deletion vectors, no column mapping and no V2 checkpoints, and says so rather than count wrongly.
Exit codes: 0 counted, 2 usage, 4 the table cannot be read.
"""

import json
import re
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import duckdb

COMMIT = re.compile(r"^(\d{20})\.json$")


class Unreadable(Exception):
    """A sentence about the table."""


def connect():
    """A DuckDB that fetches nothing."""
    return duckdb.connect(config={"autoinstall_known_extensions": "false"})


def active_files(table, database):
    """Gives the paths of the files that the last version of the table consists of."""
    log = table / "_delta_log"
    if not log.is_dir():
        raise Unreadable(f"{table} is no Delta table: it has no _delta_log")
    start, active = read_checkpoint(log, database)
    commits = sorted(int(m.group(1)) for path in log.iterdir() if (m := COMMIT.match(path.name)))
    commits = [version for version in commits if version > start]
    if start < 0 and not commits:
        raise Unreadable(f"{log} holds no commit")
    if commits != list(range(start + 1, start + 1 + len(commits))):
        raise Unreadable(f"{log} has gaps: after version {start} come {commits}")
    for version in commits:
        apply_commit(log / f"{version:020}.json", active)
    return sorted(active)


def read_checkpoint(log, database):
    """Gives (version, active paths) of the checkpoint; (-1, none) without one."""
    pointer = log / "_last_checkpoint"
    if not pointer.exists():
        return -1, set()
    last = json.loads(pointer.read_text(encoding="utf-8"))
    version, parts = last["version"], last.get("parts")
    names = (
        [f"{version:020}.checkpoint.{part:010}.{parts:010}.parquet" for part in range(1, parts + 1)]
        if parts
        else [f"{version:020}.checkpoint.parquet"]
    )
    paths = [str(log / name) for name in names]
    for path in paths:
        if not Path(path).exists():
            raise Unreadable(f"{pointer} names {Path(path).name}, which is not there (V2 checkpoints are not read)")
    columns = [row[0] for row in database.execute("describe select * from read_parquet(?)", [paths]).fetchall()]
    if "sidecar" in columns:
        (sidecars,) = database.execute("select count(sidecar) from read_parquet(?)", [paths]).fetchone()
        if sidecars:
            raise Unreadable(f"{paths[0]} has sidecars, which are not read")
    rows = database.execute('select "add" from read_parquet(?) where "add" is not null', [paths]).fetchall()
    return version, {file_path(add) for (add,) in rows}


def apply_commit(path, active):
    """Applies one commit to the set of active paths."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.strip():
            continue
        action = json.loads(line)
        if "remove" in action:
            removed = unquote(action["remove"]["path"])
            if removed not in active:
                raise Unreadable(f"{path.name} removes {removed}, which is not in the table")
            active.discard(removed)
        elif "add" in action:
            active.add(file_path(action["add"]))
        elif "metaData" in action:
            mode = action["metaData"].get("configuration", {}).get("delta.columnMapping.mode", "none")
            if mode != "none":
                raise Unreadable(f"{path.name} maps columns by {mode}, which is not read")


def file_path(add):
    """The path of an add action, decoded once: what is percent-encoded on disk stays so."""
    if add.get("deletionVector"):
        raise Unreadable(f"{add['path']} has a deletion vector, which is not read")
    return unquote(add["path"])


def located(table, path):
    """Where a path of the log lies: relative to the table, or absolute."""
    parts = urlsplit(path)
    if len(parts.scheme) > 1 and "://" in path:
        if parts.scheme != "file":
            raise Unreadable(f"{path} is not on this machine")
        return path[len("file://") :]
    return str(table / path)


def count(table, condition):
    """Gives (files, rows)."""
    database = connect()
    files = [located(table, path) for path in active_files(table, database)]
    if not files:
        return 0, 0
    where = f" where ({condition})" if condition else ""
    query = f"select count(*) from read_parquet(?, hive_partitioning=true, union_by_name=true){where}"
    (rows,) = database.execute(query, [files]).fetchone()
    return len(files), rows


def main():
    if len(sys.argv) not in (2, 3):
        print("usage: count_rows.py TABLE_DIR [SQL-FILTER]", file=sys.stderr)
        return 2
    try:
        files, rows = count(Path(sys.argv[1]).resolve(), sys.argv[2] if len(sys.argv) == 3 else None)
    except (Unreadable, OSError, ValueError, KeyError, duckdb.Error) as error:
        print(f"count_rows.py: {error}", file=sys.stderr)
        return 4
    print(json.dumps({"files": files, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
