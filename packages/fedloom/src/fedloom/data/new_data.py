"""NewData: reading of files and data sets after a run, with those of the run's options that still apply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.data.dataset import Dataset
from fedloom.data.input_spec import InputSpec
from fedloom.data.new_rows import NewRows, new_rows
from fedloom.data.sources import SOURCES, Source, source
from fedloom.data.sources._base import SampleSource
from fedloom.data.sources.detect import SOURCES_BY_ENDING, detect_source
from fedloom.data.sources.images import ImageFolder
from fedloom.data.sources.leaf import Leaf
from fedloom.data.sources.table.levels import Factors
from fedloom.data.sources.table.reading import TableSource
from fedloom.data.sources.texts import Sent140, Shakespeare, Texts
from fedloom.data.survey.agreement import load_agreement
from fedloom.errors import DataError, NoSamples
from fedloom.values import fields_of

DETECTED_OPTION_DEFAULTS = {"separator": (",", ";", "\t", "|"), "decimal": (".", ",")}
"""Options that are detected for each file, unless the run used a value other than these."""
FILE_OPTIONS = ("header", "skip", "encoding", "sheet", "labels", "catalog")
"""Options for the layout of a file, which do not apply to files in other formats."""
FIXED_TABLE_OPTIONS = (
    "agreement", "categorical", "drop", "columns", "missing", "impute", "group_columns", "task", "centre", "unit",
    "scale",
)  # fmt: skip
"""Options of a table that are determined by a trained model."""


def get_client_column(conversion: Mapping[str, Any]) -> str | None:
    """Return the name of the client column from the data options of a run, or None if these options do not name one.

    Earlier versions called this option ``users``.
    """
    column: str | None = conversion.get("client_column", conversion.get("users"))
    return column


class NewData(NamedTuple):
    """Reader of new data that uses the options of a run.

    options: table ``[data]`` of the run.
    """

    options: Mapping[str, Any]

    @property
    def factors(self) -> Factors:
        """Factors of columns (see `fedloom.data.sources.tabular.TableSource`)."""
        factors: Factors = self.options.get("factors", {})
        return factors

    def labelled(self, facts: InputSpec, data: str | Path, data_dir: str | Path | None = None) -> Dataset:
        """Read labeled new data. The columns are matched by name to the columns of the training data.

        Args:
            facts: description of the models' training data.
            data: name or path, as in ``[data] source``.
            data_dir: folder of data sets.

        Raises:
            DataError: the data are missing or damaged.
            ConfigError: the name is unknown.
        """
        reader = self.source(data, facts)
        if isinstance(reader, TableSource) and reader.chosen:
            with reader.open(data_dir) as raw:  # new rows need no subject unless they are split again
                names = raw.names
            reader = reader.with_(**reader.absent(names))
        return reader.read(data_dir)

    def rows(
        self, facts: InputSpec, data: object, data_dir: str | Path | None = None, keep: Sequence[str] = ()
    ) -> NewRows:
        """Read rows without labels from a file, or take them from memory.

        The arguments and errors are the same as in `labelled` and `new_rows`.
        """
        users, factors = get_client_column(self.options), self.factors
        if not isinstance(data, str | Path):
            return new_rows(facts, data, "rows", users, factors, keep, self.options.get("days_since"))
        if facts.vocabulary and Path(data).suffix == ".txt":
            return new_rows(facts, _read_header_lines(Path(data)), str(data))
        reader = self.source(data, facts)
        if keep and not isinstance(reader, TableSource):
            raise DataError(f"{data} is not a table, so {keep[0]!r} cannot be kept")
        if isinstance(reader, Texts):
            texts, sites = reader.rows(data_dir)
            return new_rows(facts, texts, str(data))._replace(sites=sites)
        if isinstance(reader, SampleSource):
            if isinstance(reader, ImageFolder) and reader.rgb is None and len(facts.shape) == 3:
                reader = reader.with_(rgb=facts.shape[0] == 3)
            samples, files = reader.samples(data_dir)
            return new_rows(facts, samples, str(data), factors=factors)._replace(files=files)
        if not isinstance(reader, TableSource):
            return new_rows(facts, reader.read(data_dir), str(data))
        with reader.open(data_dir) as raw:
            return new_rows(facts, raw, str(data), users, factors, keep)

    def source(self, data: str | Path, facts: InputSpec) -> Source:
        """Return a source for new data that uses the applicable data options of the run."""
        options = {k: v for k, v in self.options.items() if k not in ("source", "path")}
        name = self.options.get("source", "")
        named = SOURCES.get(name)
        if str(data) in SOURCES or str(data).startswith("hub:"):
            return source(str(data), **(options if str(data) == name else {}))
        kind = detect_source(Path(data).expanduser())
        if (named in (Shakespeare, Sent140) and kind is Leaf) or (named is Texts and issubclass(kind, TableSource)):
            kind = named
        if kind is not (named or SOURCES_BY_ENDING.get(Path(name).suffix.lower())):
            options = {k: v for k, v in options.items() if k not in FILE_OPTIONS}
        tables = issubclass(kind, TableSource) and (named is None or issubclass(named, TableSource))
        chosen = {
            k: v for k, v in options.items() if k in fields_of(kind) and v not in DETECTED_OPTION_DEFAULTS.get(k, ())
        }
        if tables and facts.table is not None:
            if "target" not in chosen and (agreed := load_agreement(options.get("agreement"))) is not None:
                chosen |= {"target": agreed.target, "event": agreed.event}
            chosen = {k: v for k, v in chosen.items() if k not in FIXED_TABLE_OPTIONS} | {"agreement": facts.agreement}
        return kind(**{**(chosen if tables or named in (None, kind) else {}), "path": str(data)})


def _read_header_lines(file: Path) -> list[str]:
    try:
        lines = file.expanduser().read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} is not readable as UTF-8 text ({error}). Use a file with one text per line") from None
    if not lines:
        raise NoSamples(f"{file} contains no rows to predict. Write one text per line")
    return lines
