# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Runs at the end of an image's build: writes the programs' launchers and the compiled files.

Usage: finish.py PROGRAM… . Fails, and the build with it, where a program cannot be imported: that is how a build image
whose Python differs from the base image's is noticed.
"""

import compileall
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from py_compile import PycInvalidationMode

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


def compile_tree(folder: Path, *, leave_out: re.Pattern[str] | None) -> None:
    """Compile all modules below a folder. What cannot be compiled is reported when something imports it."""
    compileall.compile_dir(
        folder,
        maxlevels=20,
        quiet=2,
        rx=leave_out,
        invalidation_mode=PycInvalidationMode.UNCHECKED_HASH,
        workers=1,
    )


def check(program: str) -> None:
    """Import a program as its launcher does. Raises CalledProcessError."""
    statement = f'import sys; sys.path.insert(0, "{LIBRARY}"); import {MODULES[program]}'
    subprocess.run([interpreter(), "-IS", "-c", statement], check=True)


def main() -> None:
    """Finish the image for the programs named on the command line."""
    programs = sys.argv[1:]
    compile_tree(Path(sysconfig.get_path("stdlib")), leave_out=NEVER_IMPORTED)
    compile_tree(LIBRARY, leave_out=None)
    for program in programs:
        write_launcher(program)
        check(program)


main()
