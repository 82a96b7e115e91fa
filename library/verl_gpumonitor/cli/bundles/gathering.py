# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Asks the cluster for one GPUMonitor's job: the object, its pods, and each pod's sidecar through the API server."""

import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import BinaryIO, Final
from urllib.parse import quote

import msgspec

from verl_gpumonitor.cli.monitors import GPUMonitor, parse
from verl_gpumonitor.model.trace import TraceError

from . import pods
from .answers import MAX_ANSWER_BYTES, PodRecord
from .kubectl import Forbidden, Kubectl, KubectlError, NotFound, Unreachable
from .merge import Bundle
from .pods import JobPod, NoPods

AT_ONCE: Final = 8
"""Pods that are asked at a time."""
TRIES: Final = 4
TRY_AGAIN_SECONDS: Final = 2.0
"""A sidecar answers one at a time; somebody else may be asking."""
ROLE: Final = """\
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: gpumonitor-bundle, namespace: NAMESPACE}
rules:
  - {apiGroups: [gpumonitor.dev], resources: [gpumonitors], verbs: [get]}
  - {apiGroups: [""], resources: [pods], verbs: [list]}
  - {apiGroups: [""], resources: [pods/proxy], verbs: [get]}
"""
"""What the user needs; in a namespace, the cluster's own roles `edit` and `admin` have it."""


class BundleError(Exception):
    """There is nothing to be made, and the text says why, and what there is instead."""


class Gathering:
    """One look at one job. The answers lie in files that are gone when `files` is closed."""

    def __init__(
        self,
        kubectl: Kubectl,
        *,
        namespace: str,
        name: str,
        files: ExitStack,
        tell: Callable[[str], None] = lambda _: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._kubectl = kubectl
        self._namespace, self._name = namespace, name
        self._files = files
        self._tell = tell
        self._sleep = sleep

    def bundle(self) -> Bundle:
        """Ask everybody. Raises BundleError, KubectlError."""
        monitor = self._monitor()
        found = self._pods(monitor)
        self._tell(f"asking {len(found)} pod{'s' * (len(found) != 1)} of {self._namespace}/{self._name}")
        records, notes = self._ask(found)
        if not records:
            raise BundleError(self._nothing(monitor, notes))
        return Bundle(monitor=monitor, pods=found, records=records, notes=[*_old_ends(found, records), *notes])

    def _monitor(self) -> GPUMonitor:
        path = f"/apis/gpumonitor.dev/v1alpha1/namespaces/{quote(self._namespace, safe='')}/gpumonitors/"
        try:
            return parse(self._kubectl.get(path + quote(self._name, safe="")))
        except NotFound as error:
            if "could not find the requested resource" in str(error):
                raise BundleError(
                    "this cluster knows no GPUMonitor: is the chart installed, and the context right?"
                ) from error
            raise BundleError(
                f"there is no GPUMonitor {self._name} in namespace {self._namespace}:"
                " `kubectl get gpumonitors -A` lists them"
            ) from error
        except Forbidden as error:
            raise BundleError(self._forbidden(error)) from error
        except TraceError as error:
            raise BundleError(f"what the API server answered {error}") from error

    def _pods(self, monitor: GPUMonitor) -> list[JobPod]:
        try:
            found = pods.read(self._kubectl.get(pods.list_path(self._namespace, monitor)))
        except NoPods as error:
            raise BundleError(self._nothing(monitor, [str(error)])) from error
        except Forbidden as error:
            raise BundleError(self._forbidden(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BundleError(f"the API server's list of pods cannot be read: {error}") from error
        if not found:
            raise BundleError(self._nothing(monitor, ["its pods are gone"]))
        return found

    def _ask(self, found: Sequence[JobPod]) -> tuple[dict[str, PodRecord], list[str]]:
        """Ask the sidecars; return what they keep, and why the others could not be asked."""
        with ThreadPoolExecutor(AT_ONCE, "ask") as pool:
            answers = list(pool.map(self._try, found))
        records = {answer.pod: answer for answer in answers if isinstance(answer, PodRecord)}
        notes = [f"{pod.name} is not in it: {a}" for pod, a in zip(found, answers, strict=True) if isinstance(a, str)]
        return records, notes

    def _try(self, pod: JobPod) -> PodRecord | str:
        """Return a pod's record, or why there is none. Raises BundleError where nobody may be asked."""
        if pod.port is None:
            return pod.why
        file = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - it is used after this
        try:
            return self._record(pod, file)
        except Forbidden as error:
            raise BundleError(self._forbidden(error)) from error
        except NotFound:
            return "its sidecar is of an earlier version, which keeps no record, or the pod has just gone"
        except Unreachable as error:
            return f"its sidecar did not answer ({_short(error)})"
        except (KubectlError, TraceError) as error:
            return f"its answer cannot be used ({_short(error)})"

    def _record(self, pod: JobPod, file: BinaryIO) -> PodRecord:
        for number in range(TRIES):
            try:
                file.seek(0)
                file.truncate()
                answer = self._kubectl.fetch(pods.trace_path(self._namespace, pod), file, max_bytes=MAX_ANSWER_BYTES)
                return PodRecord(pod.name, file, answer)
            except Unreachable as error:
                if number + 1 == TRIES or "error trying to reach" in str(error):
                    raise
                self._sleep(TRY_AGAIN_SECONDS)
        raise AssertionError

    def _nothing(self, monitor: GPUMonitor, why: Sequence[str]) -> str:
        """Say why there is no record, and what is left."""
        phase = monitor.status.phase
        ended = (
            f"the job has ended ({phase}), and with its pods goes what their sidecars kept; "
            if monitor.has_ended
            else ""
        )
        first = "; ".join(why[:4]) + (f"; {len(why) - 4} more" if len(why) > 4 else "")
        return (
            f"no pod of {self._namespace}/{self._name} has a record: {ended}{first}. What is left is the GPUMonitor's"
            f" status: kubectl get gpumonitor {self._name} -n {self._namespace} -o yaml"
            " | gpumon report - -o report.html"
        )

    def _forbidden(self, error: Forbidden) -> str:
        role = ROLE.replace("NAMESPACE", self._namespace)
        return f"{error}\nThe cluster's roles edit and admin may; a Role with no more than this may, too:\n{role}"


def _old_ends(found: Sequence[JobPod], records: dict[str, PodRecord]) -> list[str]:
    """Return the containers that ended before the record of their pod begins."""
    return [
        f"container {end.container} of {pod.name} ended before this record ({end.reason or 'no reason told'},"
        f" exit code {end.exit_code}, restarts {end.restarts})"
        for pod in found
        for end in pod.ends
        if pod.name in records and (end.at_unix is None or end.at_unix < records[pod.name].began_unix)
    ]


def _short(error: Exception) -> str:
    return str(error).replace("\n", " ")[:300]
