// Command coredns is the test cluster's DNS: CoreDNS with the few plugins that it needs, which
// spares the build the clouds' libraries. It lies in Kubernetes' module to share its builds.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"
	_ "github.com/coredns/coredns/plugin/template"
)

// The order in which a query passes the plugins.
func init() {
	dnsserver.Directives = []string{"bind", "ready", "errors", "cache", "kubernetes", "template"}
}

func main() {
	coremain.Run()
}
