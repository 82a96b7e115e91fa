// SPDX-FileCopyrightText: The GPUMonitor authors
// SPDX-License-Identifier: Apache-2.0

// CoreDNS with the plugins that manifests/coredns.yaml uses. The whole of it brings the clients of every cloud, and
// compiles for minutes.
package main

import (
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"
	_ "github.com/coredns/coredns/plugin/reload"
	_ "github.com/coredns/coredns/plugin/template"

	"github.com/coredns/coredns/coremain"
)

func main() {
	coremain.Run()
}
