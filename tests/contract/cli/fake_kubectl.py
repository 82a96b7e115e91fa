# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Stands for kubectl: answers from a file of what a cluster would, and hands requests to pods on to real sidecars.

The file (`FAKE_CLUSTER`) is a JSON object: path below the API server -> `{"body": …}`, `{"url": …}`, `{"file": PATH,
"ahead": SECONDS}` (a record that is sent now, by a clock that is so far ahead) or `{"error": "what kubectl prints"}`.
`-o yaml` prints the object at `FAKE_MONITOR`. Every call is noted in `calls` beside it.
"""

import json
import os
import sys
import time
from pathlib import Path

# It is started some hundred times: what one way of it alone needs is imported there.
PROXY_ERRORS = {404: "(NotFound): the server could not find the requested resource", 503: "(ServiceUnavailable): busy"}


def fail(said: str) -> int:
    print(f"Error from server {said}", file=sys.stderr)
    return 1


def sent_now(record: bytes, ahead: float) -> bytes:
    """Return a sidecar's record as sent at this moment by a clock that is so far ahead, begun 100 s before."""
    first, _, rest = record.partition(b"\n")
    sent = time.time() + ahead
    header = {**json.loads(first), "began_unix": sent - 100.0, "sent_unix": sent}
    return json.dumps(header).encode() + b"\n" + rest


def get(answers: dict[str, dict[str, object]], path: str) -> int:
    answer = answers.get(path, {"error": f'(NotFound): "{path}" not found'})
    if "error" in answer:
        return fail(str(answer["error"]))
    if "url" in answer:
        import urllib.error
        import urllib.request

        try:
            with urllib.request.urlopen(str(answer["url"]), timeout=20) as body:
                while piece := body.read1(65536):
                    sys.stdout.buffer.write(piece)
                    sys.stdout.buffer.flush()
        except urllib.error.HTTPError as error:
            return fail(PROXY_ERRORS.get(error.code, str(error)))
        except OSError as error:
            return fail(f"(ServiceUnavailable): error trying to reach service: {error}")
        return 0
    if "file" in answer:
        sys.stdout.buffer.write(sent_now(Path(str(answer["file"])).read_bytes(), float(str(answer["ahead"]))))
    else:
        print(json.dumps(answer["body"]))
    return 0


def main() -> int:
    cluster = Path(os.environ["FAKE_CLUSTER"])
    with (cluster.parent / "calls").open("a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + "\n")
    words = [word for word in sys.argv[1:] if not word.startswith("--request-timeout")]
    if "config" in words:
        print("team-a", end="")
        return 0
    if "yaml" in words:
        import yaml

        answer = json.loads(cluster.read_text())[os.environ["FAKE_MONITOR"]]
        print(yaml.safe_dump(answer["body"]), end="")
        return 0
    if "--raw" in words:
        return get(json.loads(cluster.read_text()), words[words.index("--raw") + 1])
    return fail("(BadRequest): only get --raw is known here")


if __name__ == "__main__":
    sys.exit(main())
