"""The kept references can be published: they name no folder of the machine that wrote them."""

import re

import pytest

from helpers.paths import ROOT

TEXT = (".json", ".jsonl", ".csv", ".md", ".html", ".ipynb")
FILES = sorted(file for file in (ROOT / "outputs" / "reference").rglob("*") if file.suffix in TEXT)
A_MACHINES_FOLDER = re.compile(r"(?<![\w.~/])/(?:home|root|tmp|mnt|work|opt|srv|Users)/\S*")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT / "outputs" / "reference")))
def test_a_reference_names_no_folder_of_its_machine(file):
    assert A_MACHINES_FOLDER.findall(file.read_text(encoding="utf-8")) == []
