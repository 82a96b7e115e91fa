# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
#
# Two images: `--target sidecar`, which goes into training pods, and `--target operator` (webhook and controller).
# Nothing here needs more than a plain builder: no BuildKit, no daemon.
#
# BASE_IMAGE   any image with /bin/sh and python3 (3.11 or newer) on PATH.
# BUILD_IMAGE  the same with pip, where BASE_IMAGE has none. Its Python must have the same minor version.
ARG BASE_IMAGE=docker.io/library/python:3.11-slim-bookworm
ARG BUILD_IMAGE=${BASE_IMAGE}


FROM ${BUILD_IMAGE} AS sidecar-packages
COPY requirements/sidecar.txt /requirements.txt
COPY containers/ /build/
RUN python3 -m pip install --no-cache-dir --no-compile --disable-pip-version-check --no-deps --only-binary :all: \
      --require-hashes --target /opt/gpumonitor/lib -r /requirements.txt \
    && rm -rf /opt/gpumonitor/lib/example.py /opt/gpumonitor/lib/bin \
    && python3 /build/finish.py --packages


FROM ${BUILD_IMAGE} AS operator-packages
COPY requirements/operator.txt /requirements.txt
COPY containers/ /build/
RUN python3 -m pip install --no-cache-dir --no-compile --disable-pip-version-check --no-deps --only-binary :all: \
      --require-hashes --target /opt/gpumonitor/lib -r /requirements.txt \
    && rm -rf /opt/gpumonitor/lib/example.py /opt/gpumonitor/lib/bin \
    && python3 /build/finish.py --packages


# What both images do at the end (containers/finish.py): programs that start this very python by its path, and compiled
# files for all that they import, the standard library included (official images come without). Without those files the
# sidecar takes 10 MiB more, because each start compiles everything again into a read-only file system.
# A shebang with `env` would make the kernel call the process python3, and people run `pkill -9 python`.
FROM ${BASE_IMAGE} AS sidecar
LABEL org.opencontainers.image.title="GPUMonitor sidecar" \
      org.opencontainers.image.licenses="Apache-2.0"
# Asks NVIDIA's runtime for the driver's library and for sight of the GPUs. In the image and not in the pod, since a
# pod's image may be changed where the runtime refuses this, and its environment may not.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=utility
COPY --from=sidecar-packages /opt/gpumonitor/lib /opt/gpumonitor/lib
COPY library/verl_gpumonitor /opt/gpumonitor/lib/verl_gpumonitor
COPY sidecar/verl_gpumonitor_sidecar /opt/gpumonitor/lib/verl_gpumonitor_sidecar
COPY containers/ /opt/gpumonitor/build/
RUN python3 /opt/gpumonitor/build/finish.py gpumon-sidecar && rm -rf /opt/gpumonitor/build
USER 65532:65532
ENTRYPOINT ["/opt/gpumonitor/bin/gpumon-sidecar"]


FROM ${BASE_IMAGE} AS operator
LABEL org.opencontainers.image.title="GPUMonitor operator" \
      org.opencontainers.image.licenses="Apache-2.0"
# kopf asks for the name of its user, and neither 65532 nor a uid of the cluster's choice has an entry in /etc/passwd.
ENV LOGNAME=gpumonitor
COPY --from=operator-packages /opt/gpumonitor/lib /opt/gpumonitor/lib
COPY library/verl_gpumonitor /opt/gpumonitor/lib/verl_gpumonitor
COPY sidecar/verl_gpumonitor_sidecar /opt/gpumonitor/lib/verl_gpumonitor_sidecar
COPY operator/verl_gpumonitor_operator /opt/gpumonitor/lib/verl_gpumonitor_operator
COPY containers/ /opt/gpumonitor/build/
# The sidecar's program is here too: this is the image that a pod gets whose runtime refuses the variables above.
RUN python3 /opt/gpumonitor/build/finish.py gpumon-sidecar gpumon-webhook gpumon-controller \
    && rm -rf /opt/gpumonitor/build
USER 65532:65532
