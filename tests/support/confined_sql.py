"""SQL of users reaches nothing but the tables that it is given, and changes nothing."""

import pyarrow as pa
import pytest

from datasvc.errors import ConfigError


def check_refused(run, sql, folder):
    """Check that `run(sql)` is refused, with `{file}` in place of a file of `folder`, which stays as it is."""
    secret_of_this_program = pa.table({"x": [1]})  # a name that DuckDB would find by looking at its callers
    file = folder / "secret.csv"
    file.write_text("secret")
    with pytest.raises(ConfigError) as raised:
        run(sql.replace("{file}", str(file)))
    assert "secret\n" not in str(raised.value)
    assert [path.name for path in folder.glob("secret*")] == ["secret.csv"]
    assert file.read_text() == "secret"
    assert secret_of_this_program.num_rows == 1
