"""Data sets of the Hugging Face hub and of the ``datasets`` library, as Parquet in the cache."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dbx_llmtrain import storage
from dbx_llmtrain.driver import kept
from dbx_llmtrain.driver.model_files import digest
from dbx_llmtrain.errors import DataError
from dbx_llmtrain.sections import SourceConfig

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*|\w[\w-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ROWS_AT_ONCE = 2000


def fetch(
    source: SourceConfig, cache_dir: Path, work_dir: Path | None
) -> tuple[list[Any], list[Path]]:
    """Key and files of a hub data set, downloaded once by the driver at one commit.

    Where ``revision`` is a commit whose rows are in the cache the network is not used. Raises
    ``DataError`` when the hub cannot be reached or has no such data set, subset or split.
    """
    commit = source.revision or ""
    if not _COMMIT.fullmatch(commit):
        commit = _ask(source, _commit)
    split = source.split or "train"
    key = ["hub", source.path, source.name, split, commit]
    name = digest(*map(str, key))
    files = kept.find(cache_dir, name)
    if files is None:
        with tempfile.TemporaryDirectory(prefix="dbx_llmtrain-", dir=work_dir) as folder:

            def load(source: SourceConfig) -> Any:
                import datasets

                return datasets.load_dataset(
                    source.path, source.name, split=split, revision=commit, cache_dir=folder
                )

            found = _ask(source, load)
            files = kept.keep_rows(cache_dir, name, arrow_tables(found), work_dir)
    return key, files


def keep_dataset(data: Any, cache_dir: Path, work_dir: Path | None) -> tuple[list[Any], list[Path]]:
    """Key and files of a ``datasets.Dataset``, named by the hash of what it holds."""
    with tempfile.TemporaryDirectory(prefix="dbx_llmtrain-", dir=work_dir) as folder:
        file = Path(folder) / "rows.parquet"
        kept.write_parquet(file, arrow_tables(data))
        key = ["rows", storage.hash_file(file)]
        name = digest(*key)
        return key, kept.find(cache_dir, name) or kept.keep_files(cache_dir, name, [file])


def arrow_tables(data: Any) -> Iterator[Any]:
    """The rows of a ``datasets.Dataset`` as Arrow tables, in order, without what ``datasets`` notes
    in the schema."""
    for table in data.with_format("arrow").iter(batch_size=_ROWS_AT_ONCE):
        yield table.replace_schema_metadata(None)


def _commit(source: SourceConfig) -> str:
    import huggingface_hub

    info = huggingface_hub.HfApi().dataset_info(source.path, revision=source.revision)
    return str(info.sha)


def _ask(source: SourceConfig, question: Callable[[SourceConfig], Any]) -> Any:
    try:
        return question(source)
    except ImportError as error:
        raise DataError(
            f"{source.path}: data sets of the hub need the package datasets: {error}"
        ) from error
    except Exception as error:
        # The libraries raise their own errors, those of the HTTP client that they happen to use,
        # and those of the file system; they have no common base.
        raise DataError(_explain(source, error)) from error


def _explain(source: SourceConfig, error: Exception) -> str:
    kind = type(error).__name__
    first_line = (str(error).strip() or kind).splitlines()[0]
    advice = {
        "GatedRepoError": "accept its terms on the hub, and set HF_TOKEN in the driver's "
        "environment",
        "RepositoryNotFoundError": "check the name; a private data set needs HF_TOKEN in the "
        "driver's environment",
        "RevisionNotFoundError": "check the revision",
        "ValueError": "check name (the subset) and split",
    }.get(
        kind,
        "check that the driver can reach the hub, or download the data elsewhere, put it on "
        "/Volumes and give that path",
    )
    place = storage.local_path(source.path).absolute()
    return (
        f"no file or folder {source.path} (looked for {place}), and the Hugging Face hub did not "
        f"give such a data set ({kind}: {first_line}): {advice}"
    )
