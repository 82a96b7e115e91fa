# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What the tests say to the cluster: kubectl, and waiting with a message that tells what was last seen."""

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Object = dict[str, Any]


class KubectlError(AssertionError):
    """kubectl ended with an error; the text is what it said."""


class Kubectl:
    """kubectl of one cluster, chosen by kubeconfig and never by the environment alone."""

    def __init__(self, *, program: str, kubeconfig: str) -> None:
        self._command = [program, "--kubeconfig", kubeconfig]

    def run(self, *args: str, stdin: str | None = None, timeout: float = 120.0) -> str:
        """Standard output of `kubectl args`. Raises KubectlError with its standard error."""
        done = subprocess.run([*self._command, *args], input=stdin, capture_output=True, text=True, timeout=timeout)
        if done.returncode:
            raise KubectlError(f"kubectl {' '.join(args)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def popen(self, *args: str) -> subprocess.Popen[str]:
        """kubectl in the background, such as a watch or a port-forward. The caller ends it."""
        return subprocess.Popen([*self._command, *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def get(self, kind: str, name: str, namespace: str | None = None) -> Object | None:
        """One object, or None where it does not exist."""
        text = self.run("get", kind, name, "-o", "json", "--ignore-not-found", *_in(namespace))
        return json.loads(text) if text.strip() else None

    def list(self, kind: str, namespace: str | None = None, selector: str = "") -> list[Object]:
        """All objects of a kind; of all namespaces where none is given."""
        where = _in(namespace) or ["--all-namespaces"]
        chosen = ["-l", selector] if selector else []
        items: list[Object] = json.loads(self.run("get", kind, "-o", "json", *where, *chosen))["items"]
        return items

    def apply(self, document: Object | Sequence[Object], namespace: str | None = None) -> None:
        """Apply one object or several."""
        objects = [document] if isinstance(document, dict) else list(document)
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self.run("apply", "-f", "-", *_in(namespace), stdin=text)

    def create(self, document: Object, namespace: str) -> Object:
        """Create one object and return it as the API server stored it. Raises KubectlError where it is refused."""
        created: Object = json.loads(
            self.run("create", "-f", "-", "-o", "json", *_in(namespace), stdin=json.dumps(document))
        )
        return created

    def delete(
        self, kind: str, name: str, namespace: str | None = None, *, wait: bool = True, timeout: float = 60.0
    ) -> None:
        """Delete an object; gone already is as good."""
        self.run(
            "delete", kind, name, "--ignore-not-found", f"--wait={str(wait).lower()}", *_in(namespace), timeout=timeout
        )

    def patch(self, kind: str, name: str, namespace: str | None, patch: Object) -> None:
        """Merge-patch an object."""
        self.run("patch", kind, name, "--type=merge", "-p", json.dumps(patch), *_in(namespace))

    def exec(self, pod: str, namespace: str, *command: str, container: str | None = None) -> str:
        """Output of a command inside a container."""
        chosen = ["-c", container] if container else []
        return self.run("exec", pod, "-n", namespace, *chosen, "--", *command)

    def raw(self, path: str) -> str:
        """Body of a GET below the API server, such as a pod's proxy."""
        return self.run("get", "--raw", path)


def _in(namespace: str | None) -> list[str]:
    return ["-n", namespace] if namespace else []


def eventually(look: Callable[[], T | None], *, within: float, what: str, every: float = 0.5) -> T:
    """The first truthy answer of `look` within so many seconds. Errors of kubectl count as "not yet".

    Fails with `what` was awaited and the last answer, so that a red test says what it saw.
    """
    end = time.monotonic() + within
    last: object = None
    while True:
        try:
            answer = look()
            if answer:
                return answer
            last = answer
        except (KubectlError, subprocess.TimeoutExpired) as error:
            last = error
        if time.monotonic() >= end:
            raise AssertionError(f"not within {within:g} s: {what}; last seen: {last!r}"[:4000])
        time.sleep(every)


def condition(monitor: Object | None, kind: str) -> Object:
    """A condition of a GPUMonitor by type; empty while there is none."""
    conditions = (monitor or {}).get("status", {}).get("conditions", [])
    return next((one for one in conditions if one["type"] == kind), {})
