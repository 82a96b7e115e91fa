# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A real one-node Kubernetes for the demo, the tests and development, without Docker and without an image registry.

Built from Go modules and distribution packages, run as plain processes by root. Not a part of the product, and never
for production: it is made to be broken, restarted and thrown away. Standard library and PyYAML only, so that it runs
before anything of the project is installed.
"""
