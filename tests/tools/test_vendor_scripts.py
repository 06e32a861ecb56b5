"""The scripts in the repository are those of the manifest, with their licences."""

import base64
import hashlib
import io
import tarfile

import pytest

from tools.vendor_scripts import ROOT, WrongFileError, extract, read_manifest

PACKAGES = read_manifest()
FILES = {file["target"]: file for package in PACKAGES for file in package["files"]}


@pytest.mark.parametrize("target", FILES)
def test_a_script_has_the_digest_of_the_manifest(target):
    assert hashlib.sha256((ROOT / target).read_bytes()).hexdigest() == FILES[target]["sha256"]


def test_no_other_file_is_vendored():
    folders = {(ROOT / target).parent for target in FILES}
    assert {str(path.relative_to(ROOT)) for folder in folders for path in folder.iterdir()} == FILES.keys()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package["name"])
def test_each_package_has_its_licence(package):
    (licence,) = (file["target"] for file in package["files"] if file["target"].endswith(".LICENSE"))
    # The names in the texts of the licences that we may distribute.
    title = {"0BSD": "Zero-Clause BSD", "MIT": "The MIT License", "MPL-2.0": "Mozilla Public License"}
    assert title[package["license"]] in (ROOT / licence).read_text(encoding="utf-8")


def archive_of(files):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for path, content in files.items():
            info = tarfile.TarInfo(f"package/{path}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    content = stream.getvalue()
    return content, f"sha512-{base64.b64encode(hashlib.sha512(content).digest()).decode()}"


def entry(integrity, path="a.js", content=b"1"):
    digest = hashlib.sha256(content).hexdigest()
    files = [{"path": path, "target": "out/a.js", "sha256": digest}]
    return {"name": "a", "version": "1.0.0", "integrity": integrity, "files": files}


def test_files_are_taken_only_from_the_archive_that_the_manifest_names():
    archive, integrity = archive_of({"a.js": b"1"})
    assert extract(archive, entry(integrity)) == {"out/a.js": b"1"}
    with pytest.raises(WrongFileError, match="has the integrity"):
        extract(archive + b"\0", entry(integrity))
    with pytest.raises(WrongFileError, match="no file b"):
        extract(archive, entry(integrity, path="b.js"))
    with pytest.raises(WrongFileError, match="SHA-256"):
        extract(archive, entry(integrity, content=b"2"))
    assert extract(archive, entry(integrity, content=b"2"), update=True) == {"out/a.js": b"1"}
