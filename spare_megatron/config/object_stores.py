"""Addresses of object stores and servers in the place of paths: what is wrong with them, and what is possible.

Imports little, as every command imports it.
"""

import re
from pathlib import Path

_SCHEMES = (
    *("s3", "s3a", "s3n", "r2", "b2", "minio", "oss", "cos", "obs", "oci", "swift"),
    *("gs", "gcs", "az", "azure", "abfs", "abfss", "wasb", "wasbs", "adl", "dbfs", "hdfs", "webhdfs", "viewfs"),
    *("http", "https", "ftp", "ftps", "sftp", "ssh", "scp", "file"),
)
_ADDRESS = re.compile(rf"(?:^|[:@])({'|'.join(_SCHEMES)}):/", re.IGNORECASE)
"""At the start, or after the kind of a tokenizer. A `Path` has one slash of two left."""


def refusal_of_address(path: str) -> str:
    """Why this cannot be used as a path; empty if it can.

    >>> refusal_of_address("s3://bucket/corpus")
    's3:// is not read or written: name a path of a mounted file system, and copy from or to s3:// yourself'
    >>> refusal_of_address("runs/mine"), refusal_of_address("hf:/models/llama")
    ('', '')
    """
    found = _ADDRESS.search(path)
    if found is None or Path(f"{found[1]}:").exists():
        return ""
    scheme = f"{found[1].lower()}://"
    if scheme == "file://":
        return "file:// is not read or written: name the path alone, without file://"
    return (
        f"{scheme} is not read or written: name a path of a mounted file system, and copy from or to {scheme} yourself"
    )
