"""Building a library: without torch, byte for byte reproducible anywhere; verified; broken libraries are found."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.aot.library import ARCHS, ROOT, Built, list_variants, run_aot
from tests.patience import LIMIT_S
from tests.programs import run_program
from triton_ep.aot import manifest
from triton_ep.aot.build import build
from triton_ep.aot.verify import verify
from triton_ep.config import EPConfig
from triton_ep.errors import AotCorrupted, AotMiss, ConfigError
from triton_ep.kernels.device.codes import NVSHMEM, P2P
from triton_ep.runtime.launch import INTERPRETING
from triton_ep.runtime.library import FORMAT, Library, architectures
from triton_ep.runtime.plans.layers import layer_requests
from triton_ep.runtime.plans.request import KernelRequest

pytestmark = pytest.mark.plain


def _files(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Contents and time of every file below a folder."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def test_the_library_is_verified(built: Built) -> None:
    """verify finds no fault in the library, for both architectures, and reports how many variants it checked."""
    done = run_aot("verify", "--out", built.folder)
    assert done.returncode == 0, done.stdout
    count = sum(len(Library(built.folder, arch).entries) for arch in ARCHS)
    assert f"{count} variants checked, 0 faults" in done.stdout
    assert architectures(built.folder) == list(ARCHS)


def test_a_second_build_changes_nothing(built: Built, tmp_path: Path) -> None:
    """Nothing is compiled, and no file is touched."""
    before = _files(built.folder)
    words = ["--variant", list_variants("sm_90", tmp_path / "variants")]
    words += [] if built.has_bitcode else ["--no-nvshmem"]
    done = run_aot("build", "--arch", "sm_90", "--out", built.folder, *words)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"(\d+) built", done.stdout) == ["0"]
    assert _files(built.folder) == before


def test_another_folder_gives_the_same_bytes(built: Built, tmp_path: Path) -> None:
    """Cubins and PTX are identical if sources and library are in other folders.

    Compares the shortest kernel of every folder of sources: only the path of a source might make a difference.
    """
    for folder in ("triton_ep", "kernels", "aot"):
        ignored = shutil.ignore_patterns("__pycache__", "cubins")
        shutil.copytree(ROOT / folder, tmp_path / "elsewhere" / folder, ignore=ignored)
    chosen: dict[str, KernelRequest] = {}
    library = Library(built.folder, "sm_90")
    for entry in sorted(library.entries, key=lambda entry: (built.folder / "sm_90" / entry.file).stat().st_size):
        chosen.setdefault(str(Path(library.kernels[entry.request.kernel]["file"]).parent), entry.request)
    listed = tmp_path / "variants"
    listed.write_text("\n".join(request.text() for request in chosen.values()))
    out = tmp_path / "another" / "library"
    done = run_aot(
        "build", "--arch", "sm_90", "--variant", listed, "--out", out, "--jobs", "1", root=tmp_path / "elsewhere"
    )
    assert done.returncode == 0, done.stderr
    here, there = _files(built.folder / "sm_90"), _files(out / "sm_90")
    compared = [name for name in there if name.endswith((".cubin", ".ptx.gz"))]
    assert len(compared) == 2 * len(chosen) >= 8
    assert [name for name in compared if there[name][0] != here[name][0]] == []
    mine, theirs = (json.loads(files["index.json"][0])["entries"] for files in (here, there))
    assert theirs == {signature: mine[signature] for signature in theirs}


def _copy(built: Built, tmp_path: Path) -> Path:
    folder = tmp_path / "library"
    shutil.copytree(built.folder / "sm_90", folder / "sm_90")
    return folder


def test_verify_finds_what_is_wrong(built: Built, tmp_path: Path) -> None:
    """A changed cubin, a missing one, a stray one, another PTX, a wrong parameter list: each is a fault."""
    folder = _copy(built, tmp_path)
    entries = Library(folder, "sm_90").entries
    files = [folder / "sm_90" / entry.file for entry in entries]
    data = bytearray(files[0].read_bytes())
    data[len(data) // 2] ^= 1
    files[0].write_bytes(data)
    files[1].unlink()
    (folder / "sm_90" / "stray.cubin").write_bytes(b"x")
    ptx = folder / "sm_90" / "ptx"
    shutil.copy(ptx / f"{files[3].stem}.ptx.gz", ptx / f"{files[2].stem}.ptx.gz")
    index = json.loads((folder / "sm_90" / "index.json").read_text())
    index["entries"][entries[4].request.signature()]["params"].append("i32")
    (folder / "sm_90" / "index.json").write_text(json.dumps(index))
    done = run_aot("verify", "--out", folder)
    assert done.returncode == 1
    for file, text in (
        (files[0].name, "is not what was built"),
        (files[1].name, "cannot be read"),
        (files[2].name, "its PTX is not what was assembled"),
        (files[4].name, "parameters, the index says"),
    ):
        assert re.search(rf"FAULT sm_90 {file}: .*{text}", done.stdout), (file, text, done.stdout)
    assert "stray.cubin is not in the index" in done.stdout


def test_what_is_broken_is_built_anew(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build drops an entry that lacks a field, and all entries without facts; building nothing creates no library."""
    folder = _copy(built, tmp_path)
    library = Library(folder, "sm_90")
    first, *others = library.entries
    monkeypatch.setattr("triton_ep.aot.build._kernels", lambda: library.kernels)  # kernels here are interpreted
    index = json.loads((folder / "sm_90" / "index.json").read_text())
    del index["entries"][first.request.signature()]["symbol"]
    (folder / "sm_90" / "index.json").write_text(json.dumps(index))
    (summary,) = build([], ["sm_90"], folder)
    assert (summary.kept, summary.dropped) == (len(others), 1)
    (folder / "sm_90" / "facts.json").unlink()
    assert "facts.json cannot be read" in verify(folder)[0][0]
    (summary,) = build([], ["sm_90"], folder)
    assert (summary.kept, summary.dropped) == (0, len(others))
    build([], ["sm_90"], tmp_path / "new")
    assert architectures(tmp_path / "new") == []
    with pytest.raises(ConfigError, match="cannot be written to"):
        build([], ["sm_90"], Path(__file__) / "library")
    with pytest.raises(ConfigError, match="constexprs and types are tables"):
        manifest.read_variants('{"kernel": "barrier_kernel", "constexprs": 3}')


def test_a_build_needs_no_torch(tmp_path: Path) -> None:
    """With torch blocked from import, one variant is built and verified."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import sitecustomize; "
        "from triton_ep.aot.__main__ import main; sys.exit(any(map(main, json.loads(sys.argv[2]))))"
    )
    text = manifest.of_config(
        {"max_tokens": 8, "hidden": 64, "topk": 2, "num_experts": 4, "world_size": 2, "local_world_size": 2}, "test"
    )[0].text()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    out = ["--out", str(tmp_path / "out")]
    commands = [["build", "--arch", "sm_80", "--variant", text, "--jobs", "1", *out], ["verify", *out], ["list", *out]]
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), json.dumps(commands)],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    built, verified, listed = done.stdout.strip().split("\n", 2)
    assert "1 built" in built and verified == "1 variants checked, 0 faults" and "barrier_kernel" in listed


_SHORT = """
from triton_ep.aot import manifest
read, few = manifest.read_config, ("barrier_kernel", "routing_slots_kernel")
manifest.read_config = lambda text: [one for one in read(text) if one.kernel in few]
"""


def test_the_example_runs(tmp_path: Path) -> None:
    """The example builds, verifies and shows a miss on any machine; without GPUs with two of its kernels."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    if INTERPRETING:
        (tmp_path / "sitecustomize.py").write_text(_SHORT)
        environment["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    done = run_program(["examples/07_aot.py"], environment)
    assert done.returncode == 0, done.stderr
    assert f"{3 if INTERPRETING else 10} variants checked, 0 faults" in done.stdout
    assert "AotMiss: routing_slots_kernel" in done.stdout


_EACH = """
import contextlib, io, json, sys
from triton_ep.aot.__main__ import main
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as told:
        code = main(words)
    print(json.dumps([code, told.getvalue()]))
"""


def test_wrong_requests_are_refused(tmp_path: Path) -> None:
    """Bad architecture, configuration fields or files: exit code 1 and the fault; wrong usage: exit code 2."""
    commands, texts = [], []
    for words, text in (
        (["--arch", "90", "--for-config", '{"max_tokens": 8}'], "missing ['hidden'"),
        (["--arch", "ninety", "--variant", '{"kernel": "barrier_kernel"}'], "written like sm_90"),
        (["--arch", "sm_90", "--variant", '{"kernel": "no_kernel"}'], "there are no kernels ['no_kernel']"),
        (["--arch", "sm_90", "--manifest", str(tmp_path / "none.toml")], "cannot be read"),
    ):
        commands.append(["build", *words, "--out", str(tmp_path)])
        texts.append(text)
    commands.append(["verify", "--out", str(tmp_path / "none")])
    done = run_program(["-c", _EACH, json.dumps(commands)])
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for text, (code, told) in zip((*texts, "no library in"), found, strict=True):
        assert (code, text in told) == (1, True), told
    assert run_aot("burn").returncode == 2


def test_names_of_variants_do_not_depend_on_order() -> None:
    """A variant has one signature, in whatever order its parts are given."""
    one = KernelRequest("k", {"A": 1, "B": False}, {"x": "*i32"}, ("n", "m"))
    other = KernelRequest("k", {"B": False, "A": 1}, {"x": "*i32"}, ("m", "n"))
    assert one.signature() == other.signature()
    for each in (one, dataclasses.replace(one, side_by_side=True)):
        read = KernelRequest.from_dict(json.loads(each.text()))
        assert (read.signature(), read.side_by_side) == (each.signature(), each.side_by_side)
    assert one.signature() != dataclasses.replace(one, side_by_side=True).signature()
    assert one.signature() != KernelRequest("k", {"A": 1, "B": True}, {"x": "*i32"}, ("n", "m")).signature()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"weights": True}, r"weights must be a list of \(False, True\), got True"),
        ({"topk": 2.0, "world_size": "2"}, "topk must be an integer of at least 1, got 2.0; world_size must be"),
        ({"ranks": 8}, r"ranks is 8; it must be \[ranks per node, nodes\]"),
        ({"num_experts": 7}, "num_experts 7 must be a multiple of world_size 2"),
        ({"payload": "fp8"}, "payload is 'fp8'"),
        ({"payload": "mxfp8", "compact": True}, "compact is for layers without payload"),
        ({"fp8_rows": True, "payload": "mxfp8"}, "fp8_rows are for layers without payload"),
        ({"biases": True, "low_latency": True}, "biases are for layers without low_latency"),
        ({"fp8_rows": ["f32"], "compact": True}, r"fp8_rows must be true or false, got \['f32'\]"),
        ({"fp8_rows": True, "compact": True, "hidden": 48}, "hidden 48 must be a multiple of 32"),
        ({"landing": ["row"]}, 'landing is for layers with payload "mxfp8"'),
        ({"landing": ["mx"], "payload": "mxfp8"}, r"landing has \['mx'\]; there are \('row', 'bf16'\)"),
        ({"colour": 1}, r"unknown \['colour'\]"),
        ({"sm_budget": 0}, "sm_budget must be an integer of at least 1, in layers without low_latency, got 0"),
        ({"sm_budget": 24, "low_latency": True}, "in layers without low_latency, got 24"),
    ],
)
def test_mistakes_in_a_configuration_are_told(change: dict[str, Any], text: str) -> None:
    """Errors name field and value, before anything is compiled."""
    right = {"max_tokens": 8, "hidden": 512, "topk": 2, "num_experts": 8, "world_size": 2, "local_world_size": 2}
    assert manifest.of_config({**right, "fp8_rows": True, "compact": True}, "right")
    with pytest.raises(ConfigError, match=text):
        manifest.read_config(json.dumps({**right, **change}))


@pytest.mark.parametrize("per_node, budget", [(4, None), (4, 24), (4, 6), (2, 24)])
def test_the_fields_of_a_config_are_taken(per_node: int, budget: int | None) -> None:
    """All of them, as a dictionary: the requests are those of the config's kernels."""
    config = EPConfig(64, 512, 2, 8, 0, 4, per_node, sm_budget=budget, enable_local_combine=True, shared_staging=True)
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    text = json.dumps(fields, default=str)
    network = P2P if per_node == 4 else NVSHMEM
    assert manifest.read_config(text) == manifest.unique(layer_requests(config.shape(network)))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"\xff\xfe\x00", "cannot be read"),
        (b"format = 1\nlayer = 3", r"layer must be a list of tables, \[\[layer\]\]"),
        (b"format = 1\nlayer = [3]", "layer must be a list of tables"),
        (b"format = 1\nmodels = 3", "models must be a table of tables"),
        (b"format = 1\n[models]\nx = 3", "models must be a table of tables"),
        (b"format = 1\ngrouped_gemm = 3", "grouped_gemm must be a list of tables"),
        (b"format = 1\nmxfp8 = 'x'", "mxfp8 must be a list of tables"),
        (b"format = 1\n[[variant]]\nkernel = 3", "no variant of a kernel"),
        (b"format = 1\nx = " + b"[" * 5000, "no TOML"),
    ],
)
def test_manifests_of_anybody_are_refused_by_name(text: bytes, match: str, tmp_path: Path) -> None:
    """Whatever the file contains, the ConfigError names the file."""
    path = tmp_path / "manifest.toml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=match):
        manifest.read_manifest(path)


def test_deep_json_is_refused_by_name(tmp_path: Path) -> None:
    """JSON nested deeper than the parser supports."""
    for read in (manifest.read_config, manifest.read_variants):
        with pytest.raises(ConfigError, match="no JSON"):
            read('{"a":' * 100000)


_INDEX: dict[str, Any] = {
    "format": FORMAT,
    "arch": "sm_90",
    "versions": {},
    "kernels": {"k": {"file": "barrier.py", "source": "0", "specialised": False}},
    "entries": {
        "s": {
            "request": {"kernel": "k", "constexprs": {}, "types": {}},
            "file": "k-0.cubin",
            "sha256": "0",
            "symbol": "k",
            "threads": 32,
            "shared": 0,
            "params": [],
        }
    },
}


@pytest.mark.parametrize(
    "change",
    [
        {"entries": []},
        {"entries": {"s": 3}},
        {"entries": {"s": {**_INDEX["entries"]["s"], "file": "../../k.cubin"}}},
        {"kernels": []},
        {"kernels": {"k": {"source": "0"}}},
        {"kernels": {"k": {"source": "0", "file": "/etc/passwd"}}},
        {"kernels": {"k": {"source": "0", "file": "../secret.py"}}},
        {"kernels": {"k": {"source": "", "file": "barrier.py"}}},
    ],
    ids=str,
)
def test_libraries_of_anybody_are_refused_by_name(change: dict[str, Any], tmp_path: Path) -> None:
    """A broken index is AotCorrupted; folders with other names are ignored; a missing source is another source."""
    for name in ("sm_90", "sm_abc", "sm_"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.json").write_text(json.dumps(_INDEX))
    assert architectures(tmp_path) == ["sm_90"]
    library = Library(tmp_path, "sm_90")
    (entry,) = library.entries
    library.kernels["k"]["file"] = "no_such_file.py"
    library._entries[entry.request.signature()] = library._entries.pop("s")
    with pytest.raises(AotMiss, match="built from other sources"):
        library.find(entry.request)
    (tmp_path / "sm_90" / "index.json").write_text(json.dumps({**_INDEX, **change}))
    with pytest.raises(AotCorrupted, match=r"index\.json is no index of a library"):
        Library(tmp_path, "sm_90")
