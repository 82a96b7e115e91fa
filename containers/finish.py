# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Runs at the end of an image's build: writes the programs' launchers and the compiled files.

`finish.py PROGRAM…` finishes an image. It fails, and the build with it, where a program cannot be imported: that is how
a build image whose Python differs from the base image's is noticed. `finish.py --packages` only compiles the packages
of others, in a stage that stays in the builder's cache.
"""

import py_compile
import re
import subprocess
import sys
import sysconfig
from importlib.util import cache_from_source
from pathlib import Path

ROOT = Path("/opt/gpumonitor")
LIBRARY = ROOT / "lib"
MODULES = {
    "gpumon-sidecar": "verl_gpumonitor_sidecar.main",
    "gpumon-webhook": "verl_gpumonitor_operator.admission.main",
    "gpumon-controller": "verl_gpumonitor_operator.controller.main",
}
NEVER_IMPORTED = re.compile(
    r"/(test|tests|idle_test|idlelib|lib2to3|tkinter|turtledemo|ensurepip|distutils|site-packages|dist-packages)/"
)
# -I: neither the pod's PYTHON variables nor its working directory decide what is imported. -S: nothing outside LIBRARY
# and the standard library.
LAUNCHER = """\
#!{python} -IS
import sys

sys.path.insert(0, "{library}")

from {module} import main

sys.exit(main())
"""


def interpreter() -> str:
    """Return the path of this python as the image has it, such as /usr/bin/python3."""
    return str(Path(sys.executable).parent / "python3")


def write_launcher(program: str) -> None:
    """Write one program. Its shebang names the interpreter, so that the process is called by the program's name."""
    path = ROOT / "bin" / program
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(LAUNCHER.format(python=interpreter(), library=LIBRARY, module=MODULES[program]))
    path.chmod(0o755)


def compile_tree(folder: Path) -> None:
    """Compile what is not compiled yet below a folder. What cannot be compiled is reported when something imports it.

    The compiled files are taken as they are when they are read, and not compared with their sources: builders do not
    all keep the times of files.
    """
    for source in folder.rglob("*.py"):
        if NEVER_IMPORTED.search(f"/{source.relative_to(folder)}"):
            continue
        if not Path(cache_from_source(str(source))).exists():
            py_compile.compile(str(source), quiet=2, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)


IMPORT_ALL = """\
import importlib, pkgutil, sys
sys.path.insert(0, sys.argv[1])
package = importlib.import_module(sys.argv[2])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
importlib.import_module(sys.argv[3])
"""


def check(program: str) -> None:
    """Import all modules of a program's package, in this image's python. Raises CalledProcessError."""
    module = MODULES[program]
    package = module.split(".", 1)[0]
    subprocess.run([interpreter(), "-IS", "-c", IMPORT_ALL, str(LIBRARY), package, module], check=True)


def main() -> None:
    """Do what the command line says; see the module."""
    compile_tree(LIBRARY)
    if sys.argv[1:] == ["--packages"]:
        return
    compile_tree(Path(sysconfig.get_path("stdlib")))
    for program in sys.argv[1:]:
        write_launcher(program)
        check(program)


main()
