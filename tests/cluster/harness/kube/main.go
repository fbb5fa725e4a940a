// Command kube is the test cluster's Kubernetes: etcd and the components of one release in one
// binary, so that building them links the shared nine tenths once. The first argument names the
// component; the rest are its own flags.
package main

import (
	"context"
	"fmt"
	"net/url"
	"os"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/embed"
	"k8s.io/component-base/cli"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

var components = map[string]func() *cobra.Command{
	"etcd":                    newEtcdCommand,
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": manager.NewControllerManagerCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kube-proxy":              proxy.NewProxyCommand,
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
}

func main() {
	if len(os.Args) < 2 || components[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: kube etcd|kube-apiserver|kube-controller-manager|kube-scheduler|kube-proxy|kubelet [flags]")
		os.Exit(2)
	}
	command := components[os.Args[1]]()
	// The components parse os.Args themselves, as if each were a program of its own.
	os.Args = os.Args[1:]
	os.Exit(cli.Run(command))
}

// newEtcdCommand is one etcd member that keeps its data for one test run and so never waits for
// the disk.
func newEtcdCommand() *cobra.Command {
	var folder, clients, peers string
	command := &cobra.Command{
		Use:           "etcd",
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(*cobra.Command, []string) error {
			return runEtcd(folder, clients, peers)
		},
	}
	command.Flags().StringVar(&folder, "data-dir", "", "folder of the data")
	command.Flags().StringVar(&clients, "client-url", "http://127.0.0.1:2379", "where clients connect")
	command.Flags().StringVar(&peers, "peer-url", "http://127.0.0.1:2380", "where other members would connect")
	return command
}

func runEtcd(folder, clients, peers string) error {
	clientURL, err := url.Parse(clients)
	if err != nil {
		return err
	}
	peerURL, err := url.Parse(peers)
	if err != nil {
		return err
	}
	config := embed.NewConfig()
	config.Dir = folder
	config.ListenClientUrls = []url.URL{*clientURL}
	config.AdvertiseClientUrls = []url.URL{*clientURL}
	config.ListenPeerUrls = []url.URL{*peerURL}
	config.AdvertisePeerUrls = []url.URL{*peerURL}
	config.InitialCluster = config.InitialClusterFromName(config.Name)
	config.UnsafeNoFsync = true
	etcd, err := embed.StartEtcd(config)
	if err != nil {
		return err
	}
	return <-etcd.Err()
}
