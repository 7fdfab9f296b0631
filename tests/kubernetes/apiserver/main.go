// Kubernetes' own API server, over an etcd in the same process: apiserver FOLDER PORT [arguments of kube-apiserver].
package main

import (
	"fmt"
	"net/url"
	"os"

	"go.etcd.io/etcd/server/v3/embed"
	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
)

func main() {
	config := embed.NewConfig()
	config.Dir = os.Args[1]
	config.LogLevel = "error"
	clients := url.URL{Scheme: "http", Host: "127.0.0.1:" + os.Args[2]}
	config.ListenClientUrls = []url.URL{clients}
	config.ListenPeerUrls = []url.URL{{Scheme: "http", Host: "127.0.0.1:0"}}
	etcd, err := embed.StartEtcd(config)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	<-etcd.Server.ReadyNotify()
	command := app.NewAPIServerCommand()
	command.SetArgs(append(os.Args[3:], "--etcd-servers="+clients.String()))
	os.Exit(cli.Run(command))
}
