#!/bin/sh
# Colab's image as far as it can be had elsewhere: its Python, torch and Jupyter; the first cell installs the rest.
# Then every notebook and every test. Usage: tests/colab.sh PYTHON (about 3 GB of downloads, 6 GiB of disk a Python).
set -eu
cd "$(dirname "$0")/.."
version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
venv=.venv-colab-$version
output=outputs/colab-$version
export COLAB_RELEASE_TAG=image PIP_DISABLE_PIP_VERSION_CHECK=1

if [ ! -e "$venv/after" ]; then
    rm -rf "$venv"
    "$1" -m venv "$venv"
    "$venv/bin/pip" install --quiet -r requirements-colab.txt torch==2.11.0
    "$venv/bin/pip" freeze > "$venv/before"
    "$venv/bin/python" - <<'CELL'
import json
cell = json.load(open("notebooks/00_machine.ipynb"))["cells"][1]
exec("".join(cell["source"]))
CELL
    "$venv/bin/pip" freeze > "$venv/after.new"
    echo "pip freeze before and after the first cell:"
    diff "$venv/before" "$venv/after.new" | grep '^[<>]' || true
    if diff "$venv/before" "$venv/after.new" | grep -q '^<'; then
        echo "the first cell changed a package that was there" >&2
        exit 1
    fi
    mv "$venv/after.new" "$venv/after"
    "$venv/bin/pip" install --quiet -r requirements-dev.txt -c "$venv/after"
fi
"$venv/bin/python" -m helpers run --device emulated --output "$output" --fresh
"$venv/bin/python" -m pytest
"$venv/bin/python" -m pytest -m long tests/test_colab.py
echo "Colab's packages on Python $version: done"
